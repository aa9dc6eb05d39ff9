"""Memory for the values of quantised tiles, which live for an operator or two."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from zinf_fx import ops
from zinf_fx.quantisation import dequantised
from zinf_fx.runtime.memory.buffers import Arena
from zinf_fx.runtime.tensor.tiers import physical_memory

# Bytes of values below which an ordinary allocation costs little.
_LARGE = 1 << 20

_arena: Arena | None = None


def dequantize(packed: torch.Tensor, shape: Sequence[int], name: str, dtype: torch.dtype) -> torch.Tensor:
    """As the operation `dequantize`. On the CPU, large values lie in memory that the next ones take over: fresh pages
    from the system take several times longer than the arithmetic."""
    whole = torch.Size((packed.shape[0], *shape))
    if packed.device.type != "cpu" or whole.numel() * dtype.itemsize < _LARGE:
        return ops.dequantize(packed, shape, name, dtype)
    global _arena
    if _arena is None:
        _arena = Arena("values of quantised tiles", physical_memory(), option="the machine's memory")
    (values,) = _arena.lease(whole.numel() * dtype.itemsize).owning_tensors([(0, whole, dtype)])
    return dequantised(packed, shape, name, dtype, out=values)


def _after_fork() -> None:
    """A child doesn't have the memory."""
    global _arena
    _arena = None


os.register_at_fork(after_in_child=_after_fork)
