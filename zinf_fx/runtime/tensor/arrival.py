"""The hook by which gradients that eager autograd leaves on the device go to their tier."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zinf_fx.interrupts import held_back

_take_gradient: Callable[[torch.Tensor], None]


def implement_arrival(take: Callable[[torch.Tensor], None]) -> None:
    """Let `take` move the ordinary gradient that eager autograd left in a parameter's `grad`; called once, by the
    module that knows how."""
    global _take_gradient
    _take_gradient = take


@held_back
def take_gradient(parameter: torch.Tensor) -> None:
    """Hook: a gradient that eager autograd left on the device moves to the tier of gradients."""
    _take_gradient(parameter)
