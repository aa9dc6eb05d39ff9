"""Steps in backward: a parameter is updated as soon as its gradient is whole, and the gradient never kept."""

from __future__ import annotations

import torch

from zinf_fx.errors import OptimizerError
from zinf_fx.runtime.tensor.gradient_state import GradientConsumer
from zinf_fx.runtime.tensor.storage import AbstractStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

# Of gradients that wait in memory for their update, as far as one is not larger.
GRADIENT_BUFFER = 64 << 20

_GONE = (
    "the gradient of a parameter of shape {} was consumed by its update in backward (step_in_backward=True): it can't "
    "be read, clipped, unscaled, or added to by a second backward pass; call optimizer.step() and zero_grad() after "
    "each backward pass, or leave step_in_backward out"
)


def follow(consumer: GradientConsumer, parameter: StoredTensor) -> None:
    """From now on, `consumer` takes the parameter's gradient when it is whole.

    Raises: OptimizerError when another living optimizer does.
    """
    state = parameter.storage.gradient
    if state.consumer not in (None, consumer):
        raise OptimizerError(
            f"two optimizers with step_in_backward=True have one parameter of shape {tuple(parameter.shape)}: its "
            "gradient can be consumed once; leave the option out of both"
        )
    if not state.followed:
        parameter.expects_gradient = False  # it is told of what arrives from the next use on
    state.consumer, state.backwards_due = consumer, 0


def check_steps_in_backward(closure: object, scales: bool) -> None:
    """Raises: OptimizerError when `step()` got what it would need before backward."""
    refused = "a closure" if closure is not None else "a GradScaler" if scales else None
    if refused is not None:
        raise OptimizerError(
            f"step() got {refused}, and step_in_backward=True updates parameters before it is called: leave the option "
            "out"
        )


def bytes_in_memory(gradient: torch.Tensor) -> int:
    """What a consumed gradient takes of host memory, or kept there as it was computed, until its update."""
    if not isinstance(gradient, StoredTensor):
        return gradient.nbytes
    return gradient.storage.bytes.nbytes if gradient.storage.tier == "host" else 0


def second_gradient(parameter: StoredTensor) -> OptimizerError:
    """What a parameter's second gradient before `step()` is refused with."""
    return OptimizerError(
        f"a parameter of shape {tuple(parameter.shape)} got a second gradient before optimizer.step(): with "
        "step_in_backward=True, the first one has updated it; call step() after each backward pass, or leave the "
        "option out to accumulate gradients"
    )


def gone(parameter: StoredTensor, gradient: torch.Tensor) -> StoredTensor:
    """What stands for a consumed gradient: any access to its values raises."""
    storage = parameter.storage
    why = _GONE.format(tuple(parameter.shape))
    nothing = AbstractStorage(storage.placement.gradients, storage.config, storage.numel, gradient.dtype, why)
    return StoredTensor.of(nothing, parameter.shape, parameter.device)
