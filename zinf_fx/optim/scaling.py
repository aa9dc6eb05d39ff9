"""What is done to all gradients at once between backward and the step, chunk by chunk: unscaling and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zinf_fx.optim.elementwise import update_in_chunks
from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tensor_parallel import tensor_ranks

aten = torch.ops.aten

# They change every element by itself: GradScaler's unscaling and search for infinities, what clip_grad_norm_ and
# clip_grad_value_ do in the end, on lists with `foreach=True` and otherwise on one gradient after the other, and what
# torch.distributed.pipelining divides gradients by.
_ON_LISTS = (
    aten._amp_foreach_non_finite_check_and_unscale_,
    aten._foreach_mul_,
    aten._foreach_clamp_min_,
    aten._foreach_clamp_max_,
)
_ON_ONE = (aten.mul_, aten.div_, aten.clamp_)


def _run_on_list(operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> NotImplementedType | None:
    """One of the operations on a list, where all else that it takes is the same for each tensor."""
    tensors, *rest = args[0], *map(_number, args[1:])
    stored = [tensor for tensor in tensors if isinstance(tensor, StoredTensor)]
    if kwargs or not all(_is_number(value) for value in rest) or any(tensor.views for tensor in stored):
        return NotImplemented
    ordinary = [tensor for tensor in tensors if not isinstance(tensor, StoredTensor)]
    if ordinary:
        operation(ordinary, *rest)
    place = stored[0].storage.device  # that of the numbers, too
    update_in_chunks(stored, place, lambda pieces: operation(pieces, *rest))
    if operation is aten._amp_foreach_non_finite_check_and_unscale_.default:
        _agree_on_infinities(stored, rest[0])
    return None


def _agree_on_infinities(gradients: Sequence[StoredTensor], found: torch.Tensor) -> None:
    """Of all ranks that have parts of any of `gradients`. (DTensor does this where its first gradient is divided.)"""
    together = dict.fromkeys(gradient.storage.share.ranks for gradient in gradients)
    for gradient in gradients:
        together |= dict.fromkeys(
            tensor_ranks(gradient.storage.config, group) for group in gradient.storage.share.part_of
        )
    for ranks in together:
        ranks.reduce_over_all(found, "whether gradients are finite", torch.distributed.ReduceOp.MAX)


def _run_on_one(
    operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]
) -> NotImplementedType | torch.Tensor:
    """One of the operations on one tensor. (One without dimensions has other rules for the dtype of the result.)"""
    tensor, *rest = args[0], *map(_number, args[1:])
    stored = isinstance(tensor, StoredTensor) and not tensor.views and tensor.dim()
    if kwargs or not stored or not all(_is_number(value) for value in rest):
        return NotImplemented

    def update(pieces: list[torch.Tensor]) -> None:
        for piece in pieces:
            operation(piece, *rest)

    update_in_chunks([tensor], tensor.storage.device, update)
    return tensor


def _number(value: object) -> object:
    """`value`; the full one of a DTensor: the norm of gradients of which some are DTensors is one."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dim() <= 1 and not isinstance(value, StoredTensor)
    return value is None or isinstance(value, (int, float))


for _operation in _ON_LISTS:
    handle(_operation, _run_on_list)
for _operation in _ON_ONE:
    handle(_operation, _run_on_one)
