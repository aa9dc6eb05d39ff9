"""Steps in backward: a parameter is updated as soon as its gradient is whole, and the gradient never kept."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from zinf_fx.errors import OptimizerError
from zinf_fx.runtime.tensor.storage import AbstractStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

# Of gradients that wait in memory for their update, as far as one is not larger.
GRADIENT_BUFFER = 64 << 20

_GONE = (
    "the gradient of a parameter of shape {} was consumed by its update in backward (step_in_backward=True): it can't "
    "be read, clipped, unscaled, or added to by a second backward pass; call optimizer.step() and zero_grad() after "
    "each backward pass, or leave step_in_backward out"
)


class StepsInBackward(Protocol):
    """An optimizer that can update one parameter at a time."""

    def update_in_backward(self, parameter: StoredTensor) -> None:
        """Begin the update of a parameter whose gradient is whole, and take the gradient."""

    def make_room(self, nbytes: int) -> None:
        """Wait until so many bytes more of gradients may be held."""

    def abandon(self, error: BaseException) -> None:
        """The backward pass under way ended with `error`."""


class Consumer:
    """Takes gradients for an optimizer that it doesn't keep alive."""

    def __init__(self, optimizer: StepsInBackward) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> StepsInBackward | None:
        """The optimizer, while it lives."""
        return self._optimizer()

    def arrived(self, parameter: StoredTensor) -> None:
        """See `GradientConsumer`."""
        if (optimizer := self.optimizer) is not None and parameter.grad is not None:
            optimizer.update_in_backward(parameter)

    def make_room(self, nbytes: int) -> None:
        """See `GradientConsumer`."""
        if (optimizer := self.optimizer) is not None:
            optimizer.make_room(nbytes)

    def interrupted(self, error: BaseException) -> None:
        """See `GradientConsumer`."""
        if (optimizer := self.optimizer) is not None:
            optimizer.abandon(error)

    def follow(self, parameter: StoredTensor) -> None:
        """From now on, take the parameter's gradient when it is whole.

        Raises: OptimizerError when another living optimizer does.
        """
        storage = parameter.storage
        before = storage.gradient.consumer
        if isinstance(before, Consumer) and before.optimizer not in (None, self.optimizer):
            raise OptimizerError(
                f"two optimizers with step_in_backward=True have one parameter of shape {tuple(parameter.shape)}: its "
                "gradient can be consumed once; leave the option out of both"
            )
        storage.gradient.consumer, storage.gradient.backwards_due = self, 0


def check_steps_in_backward(closure: object, scales: bool) -> None:
    """Raises: OptimizerError when `step()` got what it would need before backward."""
    refused = "a closure" if closure is not None else "a GradScaler" if scales else None
    if refused is not None:
        raise OptimizerError(
            f"step() got {refused}, and step_in_backward=True updates parameters before it is called: leave the option "
            "out"
        )


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
