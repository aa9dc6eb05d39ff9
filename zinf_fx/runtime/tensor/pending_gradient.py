"""What becomes of the gradient of a stored parameter: where it may live, who takes it, and the gradient hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from zinf_fx.adam import MasterForm, StateForm

B = TypeVar("B")


class GradientState(Enum):
    """What the `grad` of a stored parameter is.

    [Note: states of gradients]
    Autograd and users assign `grad` without telling anybody, so the state is the gradient's, and asked of nothing else:
    a stored one has it in its storage. `runtime/gradients/state.py` tells ordinary ones apart (`state_of`), and makes
    every transition that is ours. A gradient begins as NONE. What backward leaves becomes STORED on the tier of
    gradients; or PLAIN, where nothing of the parameter ever moves (see [Note: plain gradients]). ORDINARY and RECORDED
    gradients are what eager autograd or the user left: an ordinary one moves to its tier when the next gradient hook
    runs. With several ranks, a LOCAL gradient is what this rank accumulated under `no_sync`: the next backward pass
    outside takes it (NONE), and the sum over the ranks is STORED. An optimizer that steps in backward leaves CONSUMED.
    From any state, the user sets it to NONE.
    """

    NONE = "there is none"
    PLAIN = "an ordinary tensor in the memory where the parameter's gradients live"
    ORDINARY = "an ordinary tensor anywhere"
    RECORDED = "an ordinary tensor that can be differentiated, which create_graph=True leaves"
    STORED = "a stored tensor"
    LOCAL = "a stored tensor of this rank alone, which is still to be reduced"
    CONSUMED = "used by an optimizer that steps in backward: it has no values"


class GradientConsumer(Protocol):
    """What takes a parameter's gradient as soon as it is whole: an optimizer that steps in backward."""

    def take_gradients(self, parameters: Sequence[Any]) -> None:  # stored tensors, which are known above
        """Consume the parameters' `grad`, which is whole. What is left of backward needs neither it nor their
        values."""

    def make_room(self, nbytes: int) -> None:
        """Make room for a gradient of so many bytes that is about to be kept in memory until it is consumed."""

    def abandon(self, error: BaseException) -> None:
        """Note that `error` ended a backward pass in the middle."""


@dataclass
class PendingGradient(Generic[B]):
    """What is known of the gradient of one parameter before it is there.

    Attributes:
        buffers: the buffers with a place for this gradient, by the keys of all parameters that have one in them.
        replaced: the gradient in whose place eager autograd leaves this rank's alone, until that is added to it.
        backwards_due: how many compiled forward passes with the parameter have no backward pass yet.
        followed: whether there was a consumer at any time.
        any_followed: whether any gradient of this process is followed.
        state_dtype: what the optimizer that consumes it keeps its states in; None: in the dtype of the update.
        master_dtype: what that keeps its master in; None: in the dtype of the update.
    """

    buffers: dict[tuple[int, ...], B] = field(default_factory=dict)
    replaced: torch.Tensor | None = None
    backwards_due: int = 0
    followed: bool = False
    any_followed: ClassVar[bool] = False
    state_dtype: StateForm | None = None
    master_dtype: MasterForm | None = None
    _consumer: weakref.ref[GradientConsumer] | None = None

    @property
    def consumer(self) -> GradientConsumer | None:
        """What is told when the gradient is whole, while it lives."""
        return self._consumer and self._consumer()

    @consumer.setter
    def consumer(self, consumer: GradientConsumer) -> None:
        self._consumer, self.followed = weakref.ref(consumer), True
        PendingGradient.any_followed = True

    def take_replaced(self) -> torch.Tensor | None:
        """Return the gradient that was replaced, if any: it is the parameter's again."""
        replaced, self.replaced = self.replaced, None
        return replaced

    def backward_ended(self) -> None:
        """Note that one backward pass that was due has used the parameter, or won't come."""
        self.backwards_due = max(self.backwards_due - 1, 0)


_gradient_arrived: Callable[[torch.Tensor], None]


def implement_gradient_hook(arrived: Callable[[torch.Tensor], None]) -> None:
    """Let `gradient_hook` call `arrived`; called once, by the module that moves gradients to their tier."""
    global _gradient_arrived
    _gradient_arrived = arrived


def gradient_hook(parameter: torch.Tensor) -> None:
    """Move the gradient that eager autograd left in a parameter's `grad` to the tier of gradients."""
    _gradient_arrived(parameter)
