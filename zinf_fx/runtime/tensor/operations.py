"""Operations that are run in another way on stored tensors than on their gathered values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

Handler = Callable[[torch._ops.OpOverload, tuple, dict], Any]

HANDLERS: dict[torch._ops.OpOverload, Handler] = {}


def handle(operation: torch._ops.OpOverloadPacket, handler: Handler) -> None:
    """Let `handler(overload, args, kwargs)` run `operation` on stored tensors, in place of gathering their values.

    It returns what the operation does, or NotImplemented to leave a case to the ordinary way. Inside a graph that is
    being captured it isn't asked.
    """
    HANDLERS.update((getattr(operation, name), handler) for name in operation.overloads())


SAME_VALUE = {aten.detach.default, aten.alias.default}
# Results depend on shape, dtype and device alone. (Optimizers take some over: `handle`.)
_METADATA_ONLY = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
# Every element is overwritten, so that the present value need not be read.
OVERWRITES = {
    aten.copy_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.normal_.default,
    aten.uniform_.default,
}


# Operations on lists whose elements don't depend on each other.
HORIZONTAL = ("aten::_foreach_", "aten::_amp_foreach_")


def in_autocast() -> bool:
    """Whether an autocast context is open. `torch.is_autocast_enabled` says no while autocast's own casts run."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting > 1


def is_view(func: Any) -> bool:
    arguments = func._schema.arguments
    if not arguments:
        return False
    alias = arguments[0].alias_info
    return alias is not None and not alias.is_write and all(r.alias_info is not None for r in func._schema.returns)


def needs_no_value(func: Any, kwargs: dict) -> bool:
    """Whether the result depends on shape, dtype and device alone, so that no value is gathered. That is all that a
    copy on the meta device has."""
    if func is aten._to_copy.default:
        return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
    return func in _METADATA_ONLY


def decodes(tensor: torch.Tensor, kwargs: dict) -> bool:
    """Whether a conversion makes numbers of integers: `Module.to` doesn't, and what does computes with them."""
    return not tensor.is_floating_point() and (kwargs.get("dtype") or tensor.dtype).is_floating_point
