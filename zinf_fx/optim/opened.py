"""What the parts of a chunk have in common: windows that are open, and elements for the torch class to work on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import TypeVar

import torch

from zinf_fx.optim.blockwise import computed, store_computed
from zinf_fx.optim.companions import MASTER, MASTER_UP, kind_of
from zinf_fx.optim.elements import AnyWindow
from zinf_fx.optim.split import join, split
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

    @property
    def shows_the_present(self) -> bool:
        """Whether nothing was written to where they are from since they were opened."""
        return all(window.is_current for window in self._windows)

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


def take_over_written(master: Mapping[str, torch.Tensor], parameter: torch.Tensor, known: bool) -> None:
    """Take over into the master what others wrote to the parameter; where this still is the master rounded, the master
    stays. `known`: whether there is a master yet. Of split ones: see [Note: weights that others write to]."""
    if MASTER_UP in master:
        for kept in master.values() if not known else ():
            kept.zero_()
        return
    weights = master[MASTER]
    if not known:
        weights.copy_(parameter)
        return
    written = weights.to(parameter.dtype) != parameter
    weights[written] = parameter[written].to(weights.dtype)


def weights_of(
    parameter: torch.Tensor, master: Mapping[str, torch.Tensor], scratch: torch.Tensor | None
) -> torch.Tensor:
    """What the class updates: the parameter itself, or its master; a split one in `scratch`, of as many elements."""
    if MASTER_UP in master:
        return join(parameter, master[MASTER], master[MASTER_UP], scratch)
    return master.get(MASTER, parameter)


def store_weights(weights: torch.Tensor, parameter: torch.Tensor, master: Mapping[str, torch.Tensor]) -> None:
    """Put what the class updated where it will be stored from."""
    if master:
        parameter.copy_(weights)
    if MASTER_UP in master:
        split(weights, parameter, master[MASTER], master[MASTER_UP])


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
    state = {name: elements for name, elements in memory.items() if name in present and kind_of(name, memory) is None}
    for row, name in enumerate(rounded, start=1):
        if name in state:
            state[name] = computed(name, memory, scratch[row, :count])
    return state


def end_update(weights: torch.Tensor, memory: Mapping[str, torch.Tensor], state: State) -> State:
    """Put the stored states that the class left where they will be stored from. Returns the others."""
    weights.grad = None
    for name, elements in memory.items():
        if kind_of(name, memory) is None and state[name] is not elements:
            store_computed(name, memory, state[name])
    return {name: value for name, value in state.items() if name not in memory}
