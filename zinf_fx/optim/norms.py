"""Norms of tensors that are partitioned over ranks: each rank's share by itself, and one number over the ranks."""

from __future__ import annotations

import math
from types import NotImplementedType
from typing import Any

import torch
from torch.distributed import ReduceOp

from zinf_fx.optim.elements import current_chunks, open_elements
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

aten = torch.ops.aten


def _vector_norm(
    operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]
) -> NotImplementedType | torch.Tensor:
    tensor, *rest = args
    order, dims = (*rest, *(2.0, None)[len(rest) :])[:2]
    if not _is_share(tensor) or dims is not None or len(rest) > 2 or kwargs.get("keepdim") or "out" in kwargs:
        return NotImplemented
    return _norms_of([tensor], float(order))[0].to(kwargs.get("dtype") or tensor.dtype)


def _norms(operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> NotImplementedType | list:
    tensors, *rest = args
    if not any(_is_share(tensor) for tensor in tensors) or len(rest) > 1:
        return NotImplemented
    order, dtype = float(rest[0] if rest else kwargs.get("ord", 2.0)), kwargs.get("dtype")
    of_shares = iter(_norms_of([t for t in tensors if _is_share(t)], order))
    return [
        next(of_shares).to(dtype or t.dtype) if _is_share(t) else torch.linalg.vector_norm(t, order, dtype=dtype)
        for t in tensors
    ]


def _is_share(tensor: object) -> bool:
    """Whether this rank has the present values of some elements only."""
    if not isinstance(tensor, StoredTensor) or tensor.views:
        return False
    return tensor.storage.share.in_shares


def _norms_of(tensors: list[StoredTensor], order: float) -> list[torch.Tensor]:
    """The vector norms of all elements, on the tensors' device, in one collective for those of the same ranks."""
    totals = torch.stack([_part(tensor, order) for tensor in tensors]).to(tensors[0].device)
    reduce = {math.inf: ReduceOp.MAX, -math.inf: ReduceOp.MIN}.get(order, ReduceOp.SUM)
    for ranks in dict.fromkeys(tensor.storage.share.ranks for tensor in tensors):
        theirs = [number for number, tensor in enumerate(tensors) if tensor.storage.share.ranks is ranks]
        numbers = totals[theirs]
        ranks.reduce_over_shards(numbers, "norms", reduce)
        totals[theirs] = numbers
    return list(totals ** (1 / order) if math.isfinite(order) and order else totals)


def _part(tensor: StoredTensor, order: float) -> torch.Tensor:
    """What the elements that are here add to the norm before its root is taken, in the dtype in which sums of it are
    exact enough."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    extreme = max if order == math.inf else min
    nothing = {math.inf: 0.0, -math.inf: math.inf}.get(order, 0.0)
    total = torch.tensor(nothing, dtype=torch.float64, device="cpu")
    for elements in current_chunks(tensor):
        window = open_elements(tensor, CPU, elements.start, len(elements))
        try:
            part = torch.linalg.vector_norm(window.wait(), order, dtype=dtype).double()
        finally:
            window.close()
        total = total + part ** (order or 1) if math.isfinite(order) else extreme(total, part)
    return total


handle(aten.linalg_vector_norm, _vector_norm)
handle(aten._foreach_norm, _norms)
