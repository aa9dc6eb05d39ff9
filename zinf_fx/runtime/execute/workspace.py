"""The values of quantised tiles, which live for an operator or two, and products with them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from zinf_fx import ops
from zinf_fx.quantisation import can_dequantise_parts, dequantise_part, dequantised
from zinf_fx.runtime.memory.arena import Arena
from zinf_fx.runtime.memory.process import memory_limit

# Bytes of values below which an ordinary allocation costs little.
_LARGE = 1 << 20
# Bytes of a matrix's values that are there at a time. Each part ends with threads that wait for each other, and for the
# one whose processor reads from the disk meanwhile; and fewer columns are multiplied more slowly.
_AT_A_TIME = 128 << 20
# A part of a matrix has a multiple of so many rows or columns: a block of every format begins at such a column.
_ALIGNED = 128
# Products with parts are, bit for bit, those with the whole matrix. In fp32, kernels sum in an order of its own.
_IN_PARTS = torch.bfloat16

_arena: Arena | None = None


def dequantize(packed: torch.Tensor, shape: Sequence[int], name: str, dtype: torch.dtype) -> torch.Tensor:
    """Run the operation `dequantize`. On the CPU, large values lie in memory that the next ones take over: fresh pages
    from the system take several times longer than the arithmetic."""
    whole = torch.Size((packed.shape[0], *shape))
    if packed.device.type != "cpu" or whole.numel() * dtype.itemsize < _LARGE:
        return ops.dequantize(packed, shape, name, dtype)
    return dequantised(packed, shape, name, dtype, out=_allocated(whole.numel(), dtype).view(whole))


def quantised_mm(
    left: torch.Tensor,
    packed: torch.Tensor,
    columns: int,
    name: str,
    dtype: torch.dtype,
    transposed: bool,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """left [n, columns] @ values.T + bias -> [n, rows] where `transposed`, else left [n, rows] @ values + bias ->
    [n, columns], of a matrix with the bytes packed [rows, nbytes].

    Each element of the result is summed over a whole row, or column, of values. Of those there are a few at a time on
    the CPU, in bf16.
    """
    rows = len(packed)
    results, summed = (rows, columns) if transposed else (columns, rows)
    at_a_time = max(_AT_A_TIME // (summed * dtype.itemsize) // _ALIGNED, 1) * _ALIGNED
    if at_a_time >= results or dtype is not _IN_PARTS or not can_dequantise_parts(packed, dtype):
        values = dequantize(packed, (columns,), name, dtype)
        return _product(left, values.t() if transposed else values, bias)
    product = left.new_empty(len(left), results)
    room = _allocated(at_a_time * summed, dtype)
    for start in range(0, results, at_a_time):
        part = range(start, min(start + at_a_time, results))
        of_part = slice(part.start, part.stop)
        if transposed:
            values = room[: len(part) * columns].view(len(part), columns)
            dequantise_part(packed[of_part], columns, range(columns), name, values)
            values = values.t()
        else:
            values = room[: rows * len(part)].view(rows, len(part))
            dequantise_part(packed, columns, part, name, values)
        product[:, of_part] = _product(left, values, None if bias is None else bias[..., of_part])
    return product


torch.library.impl(ops.quantised_mm.name(), "CompositeExplicitAutograd", quantised_mm)


def _product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _allocated(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for so many values."""
    global _arena
    if _arena is None:
        limit = memory_limit()
        _arena = Arena("values of quantised tiles", limit.nbytes, option=limit.source)
    (values,) = _arena.allocate(count * dtype.itemsize).owning_tensors([(0, torch.Size((count,)), dtype)])
    return values


def _after_fork() -> None:
    """A child doesn't have the memory."""
    global _arena
    _arena = None


os.register_at_fork(after_in_child=_after_fork)
