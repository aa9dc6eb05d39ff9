"""What the `grad` of a stored parameter is, and how it changes from one state to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.gradients.reduction import synchronises
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


class GradientState(Enum):
    """What the `grad` of a stored parameter is.

    [Note: states of gradients]
    Autograd and users assign `grad` without telling anybody, so the state is asked of the gradient (`state_of`), and of
    nothing else. A gradient begins as NONE. What backward leaves becomes STORED on the tier of gradients; or PLAIN,
    where nothing of the parameter ever moves (see [Note: plain gradients]). ORDINARY and RECORDED gradients are what
    eager autograd or the user left: an ordinary one moves to its tier when the next gradient hook runs. With several
    ranks, a LOCAL gradient is what this rank accumulated under `no_sync`: the next backward pass outside takes it
    (NONE), and the sum over the ranks is STORED. An optimizer that steps in backward leaves CONSUMED. From any state,
    the user sets it to NONE.
    """

    NONE = "there is none"
    PLAIN = "an ordinary tensor in the memory where the parameter's gradients live"
    ORDINARY = "an ordinary tensor anywhere"
    RECORDED = "an ordinary tensor that can be differentiated, which create_graph=True leaves"
    STORED = "a stored tensor"
    LOCAL = "a stored tensor of this rank alone, which is still to be reduced"
    CONSUMED = "used by an optimizer that steps in backward: it has no values"


def state_of(gradient: torch.Tensor | None, storage: TensorStorage | None = None) -> GradientState:
    """The state of a gradient. `storage`: of its parameter, without which no gradient is known to be PLAIN."""
    if gradient is None:
        return GradientState.NONE
    if isinstance(gradient, StoredTensor):
        stored = gradient.stored
        if not stored.bytes.allocation.is_reserved:
            return GradientState.CONSUMED
        return GradientState.LOCAL if stored.share.unreduced else GradientState.STORED
    if gradient.requires_grad:
        return GradientState.RECORDED
    if storage is None or not storage.has_plain_gradient:
        return GradientState.ORDINARY
    is_dense = gradient.layout is torch.strided and gradient.is_contiguous()
    is_there = is_dense and (storage.placement.gradients == "device" or storage.tiers.host.holds(gradient))
    return GradientState.PLAIN if is_there else GradientState.ORDINARY


def stored_gradient(parameter: StoredTensor) -> StoredTensor | None:
    """The parameter's `grad`, if it is a stored tensor, and no view of one: bytes that gradients can be added to where
    they live."""
    gradient = parameter.grad
    return gradient if isinstance(gradient, StoredTensor) and not gradient.views else None


def is_reduced_now(parameter: StoredTensor) -> bool:
    """Whether a gradient that arrives now is reduced over the ranks at once."""
    share = parameter.stored.share
    if share.ranks.size == 1:
        return False
    return synchronises(share) or state_of(parameter.grad) not in (GradientState.NONE, GradientState.LOCAL)


def take_local(parameter: StoredTensor) -> StoredTensor | None:
    """The LOCAL gradient, if a backward pass is to reduce it now; the state is NONE then."""
    gradient = parameter.grad
    if not isinstance(gradient, StoredTensor) or state_of(gradient) is not GradientState.LOCAL:
        return None
    if not synchronises(parameter.stored.share):
        return None
    parameter.grad = None
    return gradient


def restore_local(parameter: StoredTensor, local: StoredTensor | None) -> None:
    """Undo `take_local`, unless another gradient has taken its place."""
    if parameter.grad is None:
        parameter.grad = local


@contextmanager
def local_taken(parameter: StoredTensor) -> Iterator[StoredTensor | None]:
    """A block that reduces what `take_local` gives it. After an error, that is the parameter's `grad` again."""
    local = take_local(parameter)
    try:
        yield local
    except BaseException:
        restore_local(parameter, local)
        raise


def check_may_have_graph(parameter: StoredTensor) -> None:
    """Raises: StoredTensorError where a gradient has to be reduced or consumed now, and can't stay RECORDED."""
    storage = parameter.stored
    alone = storage.share.ranks.size == 1
    if alone and storage.gradient.consumer is None:
        return
    why = "an optimizer steps in backward" if alone else f"{storage.share.ranks.size} ranks reduce it"
    parameter.grad = storage.gradient.take_replaced()
    raise StoredTensorError(
        "backward(create_graph=True) can't leave a gradient with its graph in a stored parameter of shape "
        f"{tuple(parameter.shape)}, as {why}: take gradients with torch.autograd.grad(..., create_graph=True), and "
        "call backward() on what is computed of them"
    )
