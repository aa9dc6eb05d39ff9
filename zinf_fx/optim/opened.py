"""What the parts of a chunk have in common: windows that are open, and elements for the torch class to work on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import TypeVar

import torch

from zinf_fx.optim.blockwise import computed, is_scale, store_computed
from zinf_fx.optim.elements import AnyWindow
from zinf_fx.optim.states import State

W = TypeVar("W", bound=AnyWindow)


class OpenWindows:
    """The windows of one update: wait for their reads, and `close` in any case."""

    def __init__(self) -> None:
        self._windows: list[AnyWindow] = []
        self._close = ExitStack()

    @property
    def ready(self) -> bool:
        """Whether `arrive` would return at once."""
        return all(window.ready for window in self._windows)

    def arrive(self) -> None:
        """Wait for the reads, and change nothing."""
        for window in self._windows:
            window.arrived()

    def close(self) -> None:
        """Give back what was not stored."""
        self._close.close()

    def _keep(self, window: W) -> W:
        self._close.callback(window.close)
        self._windows.append(window)
        return window


def take_over_written(weights: torch.Tensor, parameter: torch.Tensor, known: bool) -> None:
    """Take over into the master `weights` what others wrote to the parameter; where this still is the master rounded,
    the master stays. `known`: whether there is a master yet."""
    if not known:
        weights.copy_(parameter)
        return
    written = weights.to(parameter.dtype) != parameter
    weights[written] = parameter[written].to(weights.dtype)


def begin_update(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    memory: Mapping[str, torch.Tensor],
    present: Collection[str],
    rounded: Iterable[str],
    scratch: torch.Tensor | None,
) -> State:
    """Give flat `weights` their gradient. Returns the stored states for the class, of those in `memory` that are
    `present`. `scratch`: in the weights' dtype, rows of at least as many elements: for the gradient in another dtype,
    and for each of the `rounded` states."""
    count = weights.numel()
    weights.grad = gradient if gradient.dtype == weights.dtype else scratch[0, :count].copy_(gradient)
    state = {name: elements for name, elements in memory.items() if name in present and not is_scale(name, memory)}
    for row, name in enumerate(rounded, start=1):
        if name in state:
            state[name] = computed(name, memory, scratch[row, :count])
    return state


def end_update(weights: torch.Tensor, memory: Mapping[str, torch.Tensor], state: State) -> State:
    """Put the stored states that the class left where they will be stored from. Returns the others."""
    weights.grad = None
    for name, elements in memory.items():
        if not is_scale(name, memory) and state[name] is not elements:
            store_computed(name, memory, state[name])
    return {name: value for name, value in state.items() if name not in memory}
