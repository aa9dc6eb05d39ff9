"""Operations of eager code that use a few rows of a stored tensor, as the embeddings of some tokens or one expert's
weights: only these rows are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch

from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

aten = torch.ops.aten

# Bytes of a long read that take as long as beginning another one: rows so near to each other are read together.
_OF_A_READ = 128 << 10
# Rows are read alone where their reads take at most this part of the whole tensor's.
_LEAST_GAIN = 2
_Rows = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and the indices of rows of it, in any shape."""

# Of indices.
_DTYPES = (torch.int64, torch.int32)


def _run_on_rows(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation of `_SELECTED` on the rows that it uses."""
    selected = _SELECTED[func](*args) if func in _SELECTED else None
    rows = None if selected is None else _rows_at(*selected)
    if selected is None or rows is None:
        return NotImplemented
    tensor, indices = selected
    return rows.view(*indices.shape, *tensor.shape[1:])


def _rows_of_embedding(weight: torch.Tensor, indices: torch.Tensor, *options: object) -> _Rows | None:
    return (weight, indices) if weight.dim() == 2 else None


def _rows_of_index_select(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> _Rows | None:
    return (tensor, indices) if dim in (0, -tensor.dim()) and indices.dim() == 1 else None


def _rows_of_index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> _Rows | None:
    (first, *further) = indices
    if further or first is None or first.dtype not in _DTYPES or not _may_read_rows(tensor):
        return None
    return tensor, torch.where(first < 0, first + tensor.shape[0], first)


_SELECTED: dict[Any, Callable[..., _Rows | None]] = {
    aten.embedding.default: _rows_of_embedding,
    aten.index_select.default: _rows_of_index_select,
    aten.index.Tensor: _rows_of_index,
}
"""For each operation, the rows that it uses by its arguments; None where it uses something else."""


def _may_read_rows(tensor: torch.Tensor) -> TypeGuard[StoredTensor]:
    """Whether rows of a tensor can be read alone: it is stored, no view, not in place, and not in shards over ranks."""
    if not isinstance(tensor, StoredTensor) or tensor.views or not tensor.dim() or not tensor.numel():
        return False
    return tensor.stored.read_in_parts


def _rows_at(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor | None:
    """Return rows of a stored tensor in the order of `indices`, [number of indices, ...]. None where the whole is to be
    gathered: its rows can't be read alone, reading them takes as long, or an index is out of range."""
    if not _may_read_rows(tensor) or isinstance(indices, StoredTensor):
        return None
    if indices.dtype not in _DTYPES or not indices.numel():
        return None
    count, of_row = tensor.shape[0], tensor.numel() // tensor.shape[0]
    row_nbytes = of_row * tensor.dtype.itemsize
    wanted, positions = indices.reshape(-1).unique(return_inverse=True)
    numbers = wanted.tolist()
    runs = _runs(numbers, gap=_OF_A_READ // row_nbytes)
    nbytes = sum(len(run) * row_nbytes + _OF_A_READ for run in runs)
    if numbers[0] < 0 or numbers[-1] >= count or nbytes * _LEAST_GAIN > count * row_nbytes:
        return None
    tensor.expect_gradient()
    parts = tensor.stored.elements([range(run.start * of_row, run.stop * of_row) for run in runs])
    rows = torch.cat([part.view(-1, *tensor.shape[1:]) for part in parts]).to(tensor.device)
    places = {number: place for place, number in enumerate(chain.from_iterable(runs))}
    place_of = torch.tensor([places[number] for number in numbers], device=positions.device)
    return rows.index_select(0, place_of[positions].to(tensor.device))


def _runs(numbers: list[int], gap: int) -> list[range]:
    """Divide increasing numbers into ranges that have at most `gap` other numbers between two of them."""
    runs: list[range] = []
    for number in numbers:
        if runs and number - runs[-1].stop <= gap:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


for _operation in _SELECTED:
    handle(_operation.overloadpacket, _run_on_rows)
