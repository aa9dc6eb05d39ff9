"""Gradients on their way over the ranks: reduced, each rank's shard to that rank (ZeRO, sections 5 and 7)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zinf_fx.runtime.ranks import Collective
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.share import Share
from zinf_fx.runtime.tensor.storage import TensorStorage

_blocks = 0  # of no_sync that are open; autograd runs backward of CUDA graphs in a thread of its own


@contextmanager
def no_sync() -> Iterator[None]:
    """Backward passes in the block accumulate this rank's own gradients, without reducing them over the ranks.

    As `DistributedDataParallel.no_sync`, which a model that is wrapped heeds as well: the first backward pass after the
    block reduces the sum. Gradients are not partitioned until then, whatever the stage. With one rank there is nothing
    to reduce.
    """
    global _blocks
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1


def synchronises(share: Share) -> bool:
    """Whether a backward pass reduces the gradient of the parameter that this is the share of now."""
    wrapper = None if share.wrapper is None else share.wrapper()
    return not _blocks and (wrapper is None or wrapper.require_backward_grad_sync)


class Reduction:
    """A gradient, or that of some segments (see [Note: segments]), on its way over the ranks of its storage.

    The ranks of a group sum what each gets of its shard; then the ranks with the same shard, of all groups. It is
    summed in `Config.reduce_dtype`.

    Attributes:
        segments: that it is of.
        whole: whether this rank gets all of it, because every rank is a group by itself.
    """

    def __init__(self, storage: TensorStorage, gradient: torch.Tensor, name: str, start: int = 0) -> None:
        """Start to reduce `gradient`, which is not changed: of the elements from `start` on. `name`: the tile's, for
        errors."""
        self._ranks, self._what = storage.share.ranks, f"the gradient of {name}"
        self._purpose = RECORDER.purpose()
        self._shape, self._dtype = gradient.shape, gradient.dtype
        count = gradient.numel()
        self.whole = self._ranks.shards == 1
        self.segments = () if self.whole else storage.share.shards.within(start, count)
        padded = count if self.whole else sum(one.padded for one in self.segments)
        flat = gradient.new_empty(padded, dtype=storage.config.reduce_dtype or gradient.dtype)
        flat[:count].view(gradient.shape).copy_(gradient)
        if storage.config.gradient_reduction == "mean":
            # Divided first, as DistributedDataParallel does: the sum of many could overflow fp16.
            flat[:count].mul_(1 / self._ranks.size)
        flat[count:].zero_()
        self._source: torch.Tensor | None = flat  # is read until the collectives are over
        self._in_group: list[Collective] = []
        self._over_groups: Collective | None = None
        self._result = flat
        if self.whole:
            self.advance()
            return
        owner, rank = self.segments[0].owner, self._ranks.shard
        if owner is None:
            self._result = flat.new_empty(sum(one.shard for one in self.segments))
        elif owner != rank:
            self._result = flat[:0]
        for one in self.segments:
            first, held = one.start - start, one.held - self.segments[0].held
            mine, full = self._result[held : held + one.shard], flat[first : first + one.padded]
            if owner is None:
                self._in_group.append(self._ranks.reduce_scatter(mine, full, self._what))
            else:
                self._in_group.append(self._ranks.reduce(full, self._what, owner))

    def advance(self) -> None:
        """When the ranks of the group have summed, start to sum over the groups."""
        with RECORDER.within(self._purpose):
            self._await(self._in_group)
            self._in_group, self._source = [], None
            if self._ranks.replicas > 1 and self._over_groups is None and self._result.numel():
                self._over_groups = self._ranks.all_reduce(self._result, self._what)

    def wait(self) -> torch.Tensor:
        """What was reduced, in the gradient's dtype: flat, with padding, this rank's parts of the segments; or all of
        it, in its shape."""
        self.advance()
        if self._over_groups is not None:
            with RECORDER.within(self._purpose):
                self._await([self._over_groups])
        result = self._result.to(self._dtype)
        return result.view(self._shape) if self.whole else result

    def _await(self, collectives: list[Collective]) -> None:
        started = time.perf_counter()
        for collective in collectives:
            collective.wait()
        if collectives:
            RECORDER.waited(started, detail=f"for {self._what}")
