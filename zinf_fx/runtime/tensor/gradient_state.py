"""What is known of the gradient of a stored parameter, besides its value."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from zinf_fx.adam import MasterForm, StateForm

S = TypeVar("S")


class GradientConsumer(Protocol):
    """What takes a parameter's gradient as soon as it is whole: an optimizer that steps in backward."""

    def take_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """The parameters' `grad` is whole, and what is left of backward needs neither it nor their values."""

    def make_room(self, nbytes: int) -> None:
        """Before a gradient of so many bytes is kept in memory until it is consumed."""

    def abandon(self, error: BaseException) -> None:
        """`error` ended a backward pass in the middle."""


@dataclass
class GradientState(Generic[S]):
    """Where the gradient of one parameter is going to, and when it is whole.

    Attributes:
        space: the storage reserved for the gradient, if any; in use while anybody else has it.
        backwards_due: compiled forward passes with the parameter that have no backward pass yet.
        followed: whether there was a consumer at any time.
        any_followed: whether any gradient of this process is.
        state_dtype: what the optimizer that consumes it keeps its states in; None: in the dtype of the update.
        master_dtype: the same of its master.
    """

    space: S | None = None
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
        GradientState.any_followed = True

    def backward_ended(self) -> None:
        """One backward pass that was due has used the parameter, or won't come."""
        self.backwards_due = max(self.backwards_due - 1, 0)
