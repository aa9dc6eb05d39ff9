"""The update of elements: PyTorch's class computes with what is stored, in whatever format, and is stored likewise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Lists, State, step_together, values_of
from zinf_fx.optim.formats import MASTER, MASTER_UP, computed, join, kind_of, split, store_computed
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up


@dataclass
class Operands:
    """Elements of one parameter, [n] each, as they are stored, and what else the class has of it.

    Attributes:
        parameter: in its own dtype.
        gradient: in the dtype in which it was reduced.
        master: nothing; "master" in the dtype of the update; or the two parts of a split one: see [Note: split
            masters].
        states: by name, in the dtypes or formats in which they are kept, with their scales.
        present: the names of states that hold values; the class makes the others.
        numbers: states that aren't stored, such as a count of steps. The class changes them, or leaves others.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    master: Mapping[str, torch.Tensor]
    states: Mapping[str, torch.Tensor]
    present: Collection[str]
    numbers: State


def update_elements(inner: Optimizer, operands: Sequence[Operands], scratch: torch.Tensor | None, lists: Lists) -> bool:
    """Update elements of some parameters by one step of `inner`, a torch class with options and no parameters yet.

    Everything is updated where it is stored. This is the whole of what a step computes with elements, so that a kernel
    that knows the class and the formats can take its place.

    Args:
        scratch: in the dtype of the update, [rows, elements], each parameter's rounded up to WINDOW_ALIGNMENT: for what
            is stored in another dtype or format than the update computes in. None where nothing is.
        lists: what the class made of the same operands before.

    Returns:
        Whether nothing but the operands themselves was updated, so that the same ones and `lists` serve again.
    """
    weights: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    state: defaultdict[torch.Tensor, State] = defaultdict(dict)
    in_place, offset = True, 0
    for one in operands:
        count = one.parameter.numel()
        rows = iter(()) if scratch is None else iter(scratch[:, offset : offset + count])
        offset += round_up(count, WINDOW_ALIGNMENT)
        weight, gradient = _weights(one, rows), one.gradient
        if gradient.dtype != weight.dtype:
            gradient, in_place = next(rows).copy_(gradient), False
        state[weight] = values = dict(one.numbers)
        for name in _names(one):
            stored = one.states[name]
            if name not in one.present:
                in_place = False
            elif stored.dtype.itemsize < weight.dtype.itemsize:
                values[name], in_place = computed(name, one.states, next(rows)), False
            else:
                values[name] = stored
        weights.append(weight)
        gradients.append(gradient)
    same = step_together(inner, weights, gradients, state, values_of(state.values()), lists)
    if not (same and in_place):
        for one, weight in zip(operands, weights, strict=True):
            _store_states(one, state[weight])
    _store_weights(operands, weights)
    return same and in_place


def _names(operands: Operands) -> Iterator[str]:
    """The names of the states that the class computes with."""
    return (name for name in operands.states if kind_of(name, operands.states) is None)


def _weights(operands: Operands, rows: Iterator[torch.Tensor]) -> torch.Tensor:
    """What the class updates: the parameter itself, or its master."""
    master = operands.master
    if MASTER_UP in master:
        return join(operands.parameter, master[MASTER], master[MASTER_UP], next(rows))
    return master.get(MASTER, operands.parameter)


def _store_states(operands: Operands, state: State) -> None:
    """Put the states that the class left where they are stored; the others are `numbers`."""
    for name in _names(operands):
        if state[name] is not operands.states[name]:
            store_computed(name, operands.states, state[name])
    operands.numbers = {name: value for name, value in state.items() if name not in operands.states}


def _store_weights(operands: Sequence[Operands], weights: Sequence[torch.Tensor]) -> None:
    """Put new masters where they are stored, and round them to the parameters."""
    rounds = [number for number, one in enumerate(operands) if one.master]
    if rounds:
        torch._foreach_copy_([operands[n].parameter for n in rounds], [weights[n] for n in rounds])
    for one, weight in zip(operands, weights, strict=True):
        if MASTER_UP in one.master:
            split(weight, one.parameter, one.master[MASTER], one.master[MASTER_UP])


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
