"""Gradients on their way over the ranks: averaged, each rank's shard to that rank (ZeRO, sections 5 and 7)."""

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
    """A gradient that is being averaged over the ranks of its parameter's storage.

    With parameters or gradients partitioned, or only the states of the optimizer, this rank gets its share; in data
    parallelism, all of it. It is summed in `Config.reduce_dtype`.
    """

    def __init__(self, storage: TensorStorage, gradient: torch.Tensor, name: str) -> None:
        """Start to reduce `gradient`, which is not changed. `name`: the tile's, for errors."""
        ranks, shards = storage.ranks, storage.shards
        self._shape, self._dtype = gradient.shape, gradient.dtype
        dtype = storage.config.reduce_dtype or gradient.dtype
        self.whole = storage.placement.stage == 0
        flat = gradient.new_empty(shards.numel if self.whole else shards.padded, dtype=dtype)
        # Divided first, as DistributedDataParallel does: the sum of many could overflow fp16.
        elements = flat[: shards.numel]
        elements.view(gradient.shape).copy_(gradient)
        elements.mul_(1 / ranks.size)
        flat[shards.numel :].zero_()
        self._collective: Collective
        if self.whole:
            self._result = flat
            self._collective = ranks.all_reduce(flat, f"the gradient of {name}")
        else:
            self._result = flat.new_empty(shards.size)
            self._collective = ranks.reduce_scatter(self._result, flat, f"the gradient of {name}")
            self._source = flat  # is read until the collective is over

    def wait(self) -> torch.Tensor:
        """The average, in the gradient's dtype: flat, with padding, this rank's shard; or in its shape, all of it."""
        self._collective.wait()
        self._source = None
        result = self._result.to(self._dtype)
        return result.view(self._shape) if self.whole else result
