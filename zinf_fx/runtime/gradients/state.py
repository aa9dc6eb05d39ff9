"""What the `grad` of a stored parameter is, and how it changes from one state to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.gradients.reduction import synchronises
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.pending_gradient import GradientState
from zinf_fx.runtime.tensor.storage import TensorStorage, new_storages
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

_CONSUMED = (
    "the gradient of a parameter of shape {} was consumed by its update in backward (step_in_backward=True): it can't "
    "be read, clipped, unscaled, or added to by a second backward pass; call optimizer.step() and zero_grad() after "
    "each backward pass, or leave step_in_backward out"
)


def state_of(gradient: torch.Tensor | None, storage: TensorStorage | None = None) -> GradientState:
    """Return the state of a gradient. `storage` is that of its parameter, without which no gradient is known to be
    PLAIN."""
    if gradient is None:
        return GradientState.NONE
    if isinstance(gradient, StoredTensor):
        return gradient.stored.gradient_state
    if gradient.requires_grad:
        return GradientState.RECORDED
    if storage is None or not storage.has_plain_gradient:
        return GradientState.ORDINARY
    is_dense = gradient.layout is torch.strided and gradient.is_contiguous()
    is_there = is_dense and (storage.placement.gradients == "device" or storage.tiers.host.holds(gradient))
    return GradientState.PLAIN if is_there else GradientState.ORDINARY


def stored_gradient(parameter: StoredTensor) -> StoredTensor | None:
    """Return the parameter's `grad`, if it is a stored tensor, and no view of one: bytes that gradients can be added to
    where they live."""
    gradient = parameter.grad
    return gradient if isinstance(gradient, StoredTensor) and not gradient.views else None


def is_reduced_now(parameter: StoredTensor) -> bool:
    """Whether a gradient that arrives now is reduced over the ranks at once."""
    shard = parameter.stored.shard
    if shard.ranks.size == 1:
        return False
    return synchronises(shard) or state_of(parameter.grad) not in (GradientState.NONE, GradientState.LOCAL)


def local_gradient(parameter: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """Return a gradient of this rank's own, without values yet: whole, whatever ZeRO's stage is. It is LOCAL if there
    are other ranks."""
    storage = parameter.stored
    (stored,) = new_storages([storage], storage.placement.gradients, dtype)
    if storage.shard.ranks.size > 1:
        stored.gradient_state = GradientState.LOCAL
    return StoredTensor.of(stored, parameter.shape, parameter.device)


def consume_gradient(parameter: StoredTensor, dtype: torch.dtype) -> None:
    """Make the parameter's gradient, of this dtype, CONSUMED, after an optimizer that steps in backward has used it."""
    storage = parameter.stored
    why = _CONSUMED.format(tuple(parameter.shape))
    nothing = Allocation.unreserved(storage.placement.gradients, [storage.numel], dtype, why=why)
    stored = TensorStorage(storage.config, LocalShard(storage.shard.shards), nothing)
    stored.gradient_state = GradientState.CONSUMED
    parameter.grad = StoredTensor.of(stored, parameter.shape, parameter.device)


def take_local(parameter: StoredTensor) -> StoredTensor | None:
    """Take the LOCAL gradient, if a backward pass is to reduce it now; the state is NONE then."""
    gradient = parameter.grad
    if not isinstance(gradient, StoredTensor) or state_of(gradient) is not GradientState.LOCAL:
        return None
    if not synchronises(parameter.stored.shard):
        return None
    parameter.grad = None
    return gradient


def restore_local(parameter: StoredTensor, local: StoredTensor | None) -> None:
    """Undo `take_local`, unless another gradient has taken its place."""
    if parameter.grad is None:
        parameter.grad = local


@contextmanager
def local_taken(parameter: StoredTensor) -> Iterator[StoredTensor | None]:
    """Open a block that reduces what `take_local` gives it. After an error, that is the parameter's `grad` again."""
    local = take_local(parameter)
    try:
        yield local
    except BaseException:
        restore_local(parameter, local)
        raise


def check_may_have_graph(parameter: StoredTensor) -> None:
    """Raises: StoredTensorError where a gradient has to be reduced or consumed now, and can't stay RECORDED."""
    storage = parameter.stored
    alone = storage.shard.ranks.size == 1
    if alone and storage.gradient.consumer is None:
        return
    why = "an optimizer steps in backward" if alone else f"{storage.shard.ranks.size} ranks reduce it"
    parameter.grad = storage.gradient.take_replaced()
    raise StoredTensorError(
        "backward(create_graph=True) can't leave a gradient with its graph in a stored parameter of shape "
        f"{tuple(parameter.shape)}, as {why}: take gradients with torch.autograd.grad(..., create_graph=True), and "
        "call backward() on what is computed of them"
    )
