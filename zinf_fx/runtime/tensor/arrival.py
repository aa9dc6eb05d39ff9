"""The hook by which gradients that eager autograd leaves on the device go to their tier."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zinf_fx.interrupts import held_back

_take_gradient: Callable[[torch.Tensor], None]
_is_there: Callable[[torch.Tensor], bool]


def implement_arrival(take: Callable[[torch.Tensor], None], is_there: Callable[[torch.Tensor], bool]) -> None:
    """Let `take` move the ordinary gradient that eager autograd left in a parameter's `grad`, unless it `is_there`;
    called once, by the module that knows how."""
    global _take_gradient, _is_there
    _take_gradient, _is_there = held_back(take), is_there


def take_gradient(parameter: torch.Tensor) -> None:
    """Hook: a gradient that eager autograd left on the device moves to the tier of gradients."""
    if not _is_there(parameter):
        _take_gradient(parameter)
