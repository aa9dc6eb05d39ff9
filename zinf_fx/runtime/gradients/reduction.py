"""Gradients on their way over the ranks: reduced, each rank's shard to that rank (ZeRO, sections 5 and 7)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.ranks import Collective
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.share import Share, by_ranks
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


class _OverRanks:
    """What is on its way over the ranks of a storage: those of a group sum what each gets of its shard; then the ranks
    with the same shard, of all groups. It is summed in `Config.reduce_dtype`."""

    def __init__(self, storage: TensorStorage, dtype: torch.dtype, name: str) -> None:
        self._ranks, self._what = storage.share.ranks, f"the gradient of {name}"
        self._purpose = RECORDER.purpose()
        self._dtype, self._summed_in = dtype, storage.config.reduce_dtype or dtype
        self._divides = storage.config.gradient_reduction == "mean"
        self.whole = self._ranks.shards == 1
        self._source: torch.Tensor | None = None  # is read until the collectives are over
        self._result: torch.Tensor | None = None
        self._in_group: list[Collective] = []
        self._over_groups: Collective | None = None

    def _divide(self, elements: torch.Tensor) -> None:
        """Before the sum, as DistributedDataParallel does: that of many could overflow fp16."""
        if self._divides:
            elements.mul_(1 / self._ranks.size)

    def advance(self) -> None:
        """When the ranks of the group have summed, start to sum over the groups."""
        with RECORDER.within(self._purpose):
            self._await(self._in_group)
            self._in_group, self._source = [], None
            if self._ranks.replicas > 1 and self._over_groups is None and self._result.numel():
                self._over_groups = self._ranks.all_reduce(self._result, self._what)

    def _reduced(self) -> torch.Tensor:
        """The result, in the gradient's dtype, once it is there."""
        self.advance()
        if self._over_groups is not None:
            with RECORDER.within(self._purpose):
                self._await([self._over_groups])
        return self._result.to(self._dtype)

    def _await(self, collectives: list[Collective]) -> None:
        started = time.perf_counter()
        for collective in collectives:
            collective.wait()
        if collectives:
            RECORDER.waited(started, detail=f"for {self._what}")


class Reduction(_OverRanks):
    """A gradient, or that of some segments (see [Note: segments]), on its way over the ranks of its storage.

    Attributes:
        segments: that it is of.
        whole: whether this rank gets all of it, because every rank is a group by itself.
    """

    def __init__(self, storage: TensorStorage, gradient: torch.Tensor, name: str, start: int = 0) -> None:
        """Start to reduce `gradient`, which is not changed: of the elements from `start` on. `name`: the tile's, for
        errors."""
        super().__init__(storage, gradient.dtype, name)
        self._shape = gradient.shape
        count = gradient.numel()
        self.segments = () if self.whole else storage.share.shards.within(start, count)
        padded = count if self.whole else sum(one.padded for one in self.segments)
        flat = gradient.new_empty(padded, dtype=self._summed_in)
        flat[:count].view(gradient.shape).copy_(gradient)
        self._divide(flat[:count])
        flat[count:].zero_()
        self._source = self._result = flat
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

    def wait(self) -> torch.Tensor:
        """What was reduced, in the gradient's dtype: flat, with padding, this rank's parts of the segments; or all of
        it, in its shape."""
        result = self._reduced()
        return result.view(self._shape) if self.whole else result


class PackReduction(_OverRanks):
    """The gradients of several parameters of a pack on their way over its ranks, in one collective: see
    [Note: packs over ranks].

    Attributes:
        members: each of them by itself.
    """

    def __init__(self, storages: Sequence[TensorStorage], gradients: Sequence[torch.Tensor], name: str) -> None:
        """Start to reduce `gradients`, of one dtype, which are not changed. `name`: the pack's, for errors."""
        super().__init__(storages[0], gradients[0].dtype, name)
        shards = [storage.share.shards for storage in storages]
        counts = [gradient.numel() if self.whole else one.size for gradient, one in zip(gradients, shards, strict=True)]
        *starts, end = accumulate(counts, initial=0)
        rows = gradients[0].new_zeros((self._ranks.shards, end), dtype=self._summed_in)
        copies = [
            both
            for gradient, start, count in zip(gradients, starts, counts, strict=True)
            for both in by_ranks(gradient.reshape(-1), rows[:, start : start + count])
        ]
        torch._foreach_copy_([place for _, place in copies], [part for part, _ in copies])
        self._divide(rows)
        self.members = [
            ReducedMember(self, range(start, start + count), gradient.shape, one)
            for gradient, start, count, one in zip(gradients, starts, counts, shards, strict=True)
        ]
        self._found: torch.Tensor | None = None
        self._source = self._result = rows.view(-1)
        if self.whole:
            self.advance()
        else:
            self._result = rows.new_empty(end)
            self._in_group.append(self._ranks.reduce_scatter(self._result, self._source, self._what))

    def result(self, elements: range) -> torch.Tensor:
        """Elements of what this rank gets, once it is there."""
        if self._found is None:
            self._found = self._reduced()
        return self._found[elements.start : elements.stop]


class ReducedMember:
    """The gradient of one parameter in a `PackReduction`; as a `Reduction`."""

    def __init__(self, pack: PackReduction, elements: range, shape: torch.Size, shards: Shards) -> None:
        """`elements`: which of those that this rank gets are the parameter's; `shape`: of all of the gradient."""
        self._pack, self._elements, self._shape = pack, elements, shape
        self.whole = pack.whole
        self.segments = () if pack.whole else shards.segments

    def wait(self) -> torch.Tensor:
        """What was reduced, as that of a `Reduction`."""
        result = self._pack.result(self._elements)
        return result.view(self._shape) if self.whole else result


Reduced = Reduction | ReducedMember
"""A gradient on its way over the ranks."""
