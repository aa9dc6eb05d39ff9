"""The update of elements: PyTorch's class computes with what is stored, in whatever format, and is stored likewise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import State, TensorLists
from zinf_fx.optim.formats import MASTER, MASTER_UP, computed, join, kind_of, split, store_computed
from zinf_fx.optim.kernels import NativeOperands, Operands, has_kernel
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up


def update_elements(
    inner: Optimizer,
    operands: Sequence[Operands],
    scratch: torch.Tensor | None,
    lists: TensorLists | NativeOperands | None = None,
    threads: int = 1,
) -> TensorLists | NativeOperands | None:
    """Update elements of some parameters by one step of `inner`, a torch class with options and no parameters yet.

    Everything is updated where it is stored: by a native kernel where there is one, else by the class, to the same
    bits. This is the whole of what a step computes with elements.

    Args:
        operands: of parameters that have the same states.
        scratch: in the dtype of the update, [rows, elements], each parameter's rounded up to WINDOW_ALIGNMENT: for what
            is stored in another dtype or format than the update computes in. None where nothing is.
        lists: what the last update of the same operands returned.
        threads: how many share the elements at most, of those that a native kernel updates.

    Returns:
        What serves in the next update of the same operands; None where others than the operands were updated.
    """
    if not isinstance(lists, TensorLists):
        native = (lists or NativeOperands.of(inner, operands)) if has_kernel(inner) else None
        if native is not None:
            return native if native.update(inner, threads=threads) else None
        lists = None
    names = [name for name in operands[0].states if kind_of(name, operands[0].states) is None]
    gradients = [of_parameter.gradient for of_parameter in operands]
    in_place = lists is not None
    if lists is None:
        lists, gradients, in_place = _computed_with(operands, names, scratch)
    in_place = lists.step(inner, gradients) and in_place
    if not in_place:
        for of_parameter, weight in zip(operands, lists.weights, strict=True):
            _store_states(of_parameter, names, lists.state[weight])
    _store_weights(operands, lists.weights)
    return lists if in_place else None


def _computed_with(
    operands: Sequence[Operands], names: Sequence[str], scratch: torch.Tensor | None
) -> tuple[TensorLists, list[torch.Tensor], bool]:
    """Return what the class computes with, the gradients, and whether all that are the operands themselves. `names` are
    those of the states that the class has."""
    weights: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    states: list[State] = []
    in_place, offset = True, 0
    for of_parameter in operands:
        master, parameter = of_parameter.master, of_parameter.parameter
        rows: Iterator[torch.Tensor] = iter(())
        if scratch is not None:
            rows = iter(scratch[:, offset : offset + parameter.numel()])
            offset += round_up(parameter.numel(), WINDOW_ALIGNMENT)
        if MASTER_UP in master:
            weight, in_place = join(parameter, master[MASTER], master[MASTER_UP], next(rows)), False
        else:
            weight = master.get(MASTER, parameter)
        gradient = of_parameter.gradient
        if gradient.dtype != weight.dtype:
            gradient, in_place = next(rows).copy_(gradient), False
        values = dict(of_parameter.numbers)
        for name in names:
            stored = of_parameter.states[name]
            if name not in of_parameter.present:
                in_place = False
            elif stored.dtype.itemsize < weight.dtype.itemsize:
                values[name], in_place = computed(name, of_parameter.states, next(rows)), False
            else:
                values[name] = stored
        weights.append(weight)
        gradients.append(gradient)
        states.append(values)
    return TensorLists(weights, states), gradients, in_place


def _store_states(operands: Operands, names: Sequence[str], state: State) -> None:
    """Put the states that the class left where they are stored; the others are `numbers`."""
    for name in names:
        if state[name] is not operands.states[name]:
            store_computed(name, operands.states, state[name])
    operands.numbers = {name: value for name, value in state.items() if name not in operands.states}


def _store_weights(operands: Sequence[Operands], weights: Sequence[torch.Tensor]) -> None:
    """Put new masters where they are stored, and round them to the parameters."""
    rounds = [number for number, of_parameter in enumerate(operands) if of_parameter.master]
    if rounds:
        torch._foreach_copy_([operands[n].parameter for n in rounds], [weights[n] for n in rounds])
    for of_parameter, weight in zip(operands, weights, strict=True):
        if MASTER_UP in of_parameter.master:
            split(weight, of_parameter.parameter, of_parameter.master[MASTER], of_parameter.master[MASTER_UP])


def take_over_written(master: Mapping[str, torch.Tensor], parameter: torch.Tensor, known: bool) -> None:
    """Take over into the master what others wrote to the parameter; where this still is the master rounded, the master
    stays. `known` says whether there is a master yet. Of split ones: see [Note: weights that others write to]."""
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
