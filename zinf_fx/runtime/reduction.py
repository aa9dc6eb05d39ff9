"""Gradients on their way over the ranks: reduced, each rank's shard to that rank (ZeRO, sections 5 and 7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zinf_fx.runtime.ranks import Collective
from zinf_fx.runtime.storage import TensorStorage

_blocks = 0  # of no_sync that are open; autograd runs backward of CUDA graphs in a thread of its own


@contextmanager
def no_sync() -> Iterator[None]:
    """Backward passes in the block accumulate this rank's own gradients, without reducing them over the ranks.

    As `DistributedDataParallel.no_sync`: the first backward pass after the block reduces the sum. Gradients are not
    partitioned until then, whatever the stage. With one rank there is nothing to reduce.
    """
    global _blocks
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1


def synchronises() -> bool:
    """Whether a backward pass reduces gradients now."""
    return not _blocks


class Reduction:
    """A gradient that is being reduced over the ranks of its parameter's storage.

    The ranks of a group sum what each gets of its shard; then the ranks with the same shard, of all groups. It is
    summed in `Config.reduce_dtype`.

    Attributes:
        whole: whether this rank gets all of it, because every rank is a group by itself.
    """

    def __init__(self, storage: TensorStorage, gradient: torch.Tensor, name: str) -> None:
        """Start to reduce `gradient`, which is not changed. `name`: the tile's, for errors."""
        self._ranks, self._what, shards = storage.ranks, f"the gradient of {name}", storage.shards
        self._shape, self._dtype = gradient.shape, gradient.dtype
        flat = gradient.new_empty(shards.padded, dtype=storage.config.reduce_dtype or gradient.dtype)
        elements = flat[: shards.numel]
        elements.view(gradient.shape).copy_(gradient)
        if storage.config.gradient_reduction == "mean":
            # Divided first, as DistributedDataParallel does: the sum of many could overflow fp16.
            elements.mul_(1 / self._ranks.size)
        flat[shards.numel :].zero_()
        self.whole = self._ranks.shards == 1
        self._in_group: Collective | None = None
        self._over_groups: Collective | None = None
        self._result = flat
        if not self.whole:
            self._result = flat.new_empty(shards.size)
            self._in_group = self._ranks.reduce_scatter(self._result, flat, self._what)
            self._source = flat  # is read until the collective is over
        else:
            self.advance()

    def advance(self) -> None:
        """When the ranks of the group have summed, start to sum over the groups."""
        if self._in_group is not None:
            self._in_group.wait()
            self._in_group = self._source = None
        if self._ranks.replicas > 1 and self._over_groups is None:
            self._over_groups = self._ranks.all_reduce(self._result, self._what)

    def wait(self) -> torch.Tensor:
        """What was reduced, in the gradient's dtype: flat, with padding, this rank's shard; or in its shape, all."""
        self.advance()
        if self._over_groups is not None:
            self._over_groups.wait()
        result = self._result.to(self._dtype)
        return result.view(self._shape) if self.whole else result
