"""Operations of eager code that use a few rows of a stored tensor, as the embeddings of some tokens or one expert's
weights: only these rows are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import PAGE

aten = torch.ops.aten

# Rows are read alone where they take at most this part of the bytes: a read of many pieces takes longer for each byte.
_WORTH_IT = 2


def _use_rows(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation of `_SELECTED` on the rows that it uses."""
    selected = _SELECTED[func](*args) if func in _SELECTED else None
    rows = None if selected is None else _rows_at(*selected)
    if selected is None or rows is None:
        return NotImplemented
    tensor, indices = selected
    return rows.view(*indices.shape, *tensor.shape[1:])


def _of_embedding(weight: torch.Tensor, indices: torch.Tensor, *options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return weight, indices


def _of_index_select(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    return (tensor, indices) if dim in (0, -tensor.dim()) and indices.dim() == 1 else None


def _of_index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor] | None:
    (first, *further) = indices
    if further or first is None or first.dtype not in (torch.int64, torch.int32):
        return None
    return tensor, torch.where(first < 0, first + tensor.shape[0], first)


_SELECTED: dict[Any, Callable[..., tuple[torch.Tensor, torch.Tensor] | None]] = {
    aten.embedding.default: _of_embedding,
    aten.index_select.default: _of_index_select,
    aten.index.Tensor: _of_index,
}
"""For each operation, of its arguments, a tensor and the indices of the rows that it uses of it, in any shape; None
where it uses others."""


def _rows_at(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor | None:
    """Return the rows of a stored tensor at `indices`, in their order, [number of indices, ...]; None where it is
    gathered as a whole, or to be indexed in the ordinary way, as where an index is none of a row."""
    if not isinstance(tensor, StoredTensor) or tensor.views or tensor.dim() < 1 or not indices.numel():
        return None
    if isinstance(indices, StoredTensor) or tensor.stored.in_place or tensor.stored.shard.in_shards:
        return None
    numbers, positions = indices.reshape(-1).unique(return_inverse=True)
    runs = _runs(numbers.tolist())
    count, of_row = tensor.shape[0], tensor.numel() // tensor.shape[0]
    nbytes = sum(len(run) * of_row * tensor.dtype.itemsize + PAGE for run in runs)
    outside = runs[0].start < 0 or runs[-1].stop > count
    if outside or nbytes * _WORTH_IT > tensor.numel() * tensor.dtype.itemsize:
        return None
    tensor.expect_gradient()
    parts = tensor.stored.elements([range(run.start * of_row, run.stop * of_row) for run in runs])
    if parts is None:
        return None
    rows = torch.cat([part.view(-1, *tensor.shape[1:]) for part in parts])
    return rows.index_select(0, positions.to(rows.device))


def _runs(numbers: list[int]) -> list[range]:
    """Divide increasing numbers into ranges without gaps."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


for _operation in _SELECTED:
    handle(_operation.overloadpacket, _use_rows)
