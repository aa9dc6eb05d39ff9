"""PyTorch's own optimizers do the arithmetic: a class is borrowed, with all that an optimizer has.

An optimizer has options of its groups, and attributes, besides parameters and their states.

Some classes change these at each step: a counter of steps in the group, a flag on the optimizer. What changes alike
over any parameters is not a coupling of parameters: the step of a stand-in shows it. See `rehearsal`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.optim.recurrence import same_objects, values_of

# Attributes that no class of arithmetic changes in place, and that may have an entry for each parameter.
_HANDED_ON = {"param_groups", "state", "defaults", "_state", "_groups"}

Group = dict[str, Any]
"""One of an optimizer's `param_groups`: its options, and the parameters under "params"."""

State = dict[str, Any]
"""What an optimizer's `state` has for one parameter: tensors and numbers by name."""


def snapshot(group: Group) -> Group:
    """Copy the group's options of this moment: a scheduler may change them while the step goes on."""
    return copied({k: v for k, v in group.items() if k != "params"})


def as_groups(params: Iterable[Any]) -> list[Group]:
    """Put parameters, as every torch optimizer takes them, in groups."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of tensors or of dicts, but got a tensor")
    params = list(params)
    if not params:
        raise ValueError("optimizer got an empty parameter list")
    return params if isinstance(params[0], dict) else [{"params": params}]


def skips(optimizer: Optimizer) -> bool:
    """Whether a GradScaler found infinities, and says that this step is to change nothing."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())


def borrow(optimizer: Optimizer, kind: type[Optimizer], group: Group, parameters: Sequence[torch.Tensor]) -> Optimizer:
    """Return an optimizer of class `kind` over `parameters`, with everything else as `optimizer` has it at this moment.

    So options, GradScaler's `grad_scale` and whatever else the class keeps on the object are in force; tensors and
    collections among them are copies. Its state is empty. Hooks belong to `optimizer`, and this has none; run it with
    `step_without_hooks`, because some are of all optimizers.
    """
    inner = object.__new__(kind)
    attributes = without_hooks(optimizer)
    inner.__dict__.update({name: attributes.pop(name) for name in _HANDED_ON.intersection(attributes)})
    inner.__dict__.update(copied(attributes))
    inner.param_groups = [{**snapshot(group), "params": list(parameters)}]
    inner.state = defaultdict(dict)
    inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return inner


def without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of `optimizer`, less its hooks: those may hold it, and what has its attributes may outlive
    it."""
    return {k: v for k, v in vars(optimizer).items() if not (k.startswith("_optimizer_") and k.endswith("_hooks"))}


def step_without_hooks(inner: Optimizer) -> None:
    """Run `inner.step()` as its class wrote it: torch wraps `step` so that it runs hooks, which are for whole steps."""
    step = type(inner).step
    if getattr(step, "hooked", False):
        step = vars(step)["__wrapped__"]
    if isinstance(inner, torch.optim.Adagrad):
        _give_first_states(inner)
    step(inner)


class TensorLists:
    """Tensors that a torch class updates in one call, with their states, from step to step.

    The classes of torch.optim list their parameters, their gradients, and what is in their states at the begin of each
    step (`_init_group`). While the states have the same objects, only the gradients are others, and the lists serve.

    Attributes:
        weights: the tensors.
        state: the states of the weights, as the class keeps them.
    """

    def __init__(self, weights: Sequence[torch.Tensor], states: Sequence[State]) -> None:
        """`states` has an entry for each of the weights."""
        self.weights = list(weights)
        self.state: defaultdict[torch.Tensor, State] = defaultdict(dict, zip(weights, states, strict=True))
        self._known: tuple[object, list[tuple[object, ...]]] | None = None  # what the class lists, but for gradients
        self.take_over_states()

    def take_over_states(self) -> None:
        """Take the objects that the states have now for those that are to be in them."""
        self._values = values_of(self.state.values())

    def step(self, inner: Optimizer, gradients: Sequence[torch.Tensor]) -> bool:
        """Take a step of `inner`, borrowed without parameters. Returns whether the same objects are all that is in the
        states afterwards."""
        inner.param_groups[0]["params"] = list(self.weights)
        inner.state = self.state
        with self._served(inner, gradients) as known:
            step_without_hooks(inner)
        # A class that is given its lists works on what is in them, and puts nothing else in the states.
        same = known or same_objects(values_of(self.state.values()), self._values)
        if not same:
            self._known = None
        return same

    @contextmanager
    def _served(self, inner: Optimizer, gradients: Sequence[torch.Tensor]) -> Iterator[bool]:
        """Open a block in which `inner` has these gradients: its lists give them, where these are known; else each is
        the `grad` of its weight, and the block notes what the class lists. Yields whether the lists are known."""
        kind: Any = type(inner)
        known, makes = self._known, kind.__module__.startswith("torch.optim.") and hasattr(inner, "_init_group")

        def give(group: Group, *lists: list[object]) -> object:
            assert known is not None
            result, (parameters, *states) = known
            for to_fill, values in zip(lists, (parameters, gradients, *states), strict=True):
                to_fill.extend(values)
            return result

        def note(group: Group, *lists: list[object]) -> object:
            result = kind._init_group(inner, group, *lists)
            parameters, _, *states = map(tuple, lists)
            self._known = result, [parameters, *states]
            return result

        if makes:  # another class may look at the parameters elsewhere, too
            vars(inner)["_init_group"] = note if known is None else give
        try:
            for weight, gradient in zip(self.weights, gradients, strict=True) if known is None else ():
                weight.grad = gradient
            yield known is not None
        finally:
            vars(inner).pop("_init_group", None)  # which holds it
            for weight in self.weights if known is None else ():
                weight.grad = None


def show(entries: Iterable[State], states: Iterable[State]) -> None:
    """Have entries show states that aren't stored, as torch does: tensors in place, so that a batch comes again."""
    shown: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for entry, state in zip(entries, states, strict=True):
        for name, value in state.items():
            present = entry.get(name)
            if present is value:
                continue
            if not (isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor)):
                entry[name] = value
            elif (present.shape, present.dtype, present.device) == (value.shape, value.dtype, value.device):
                shown.append(present)
                values.append(value)
            else:
                entry[name] = value
    if shown:
        torch._foreach_copy_(shown, values)


def _give_first_states(inner: torch.optim.Adagrad) -> None:
    """Make states of parameters without any. Up to torch 2.11, Adagrad makes them at construction, and no step does."""
    for group in inner.param_groups:
        new = [p for p in group["params"] if p.grad is not None and not inner.state[p]]
        if new:
            options = {name: group[name] for name in inner.defaults if name in group}
            inner.state.update(torch.optim.Adagrad(new, **options).state)


def step_groups(
    optimizer: Optimizer, kind: type[Optimizer], groups: list[Group], state: defaultdict[torch.Tensor, State]
) -> None:
    """Take a step of class `kind` over the parameters in `groups`, if any, in memory, as `optimizer` would take it."""
    if groups:
        inner = borrow(optimizer, kind, {}, [])
        inner.param_groups, inner.state = groups, state
        step_without_hooks(inner)


def states_of_zeros(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, parameters: Sequence[torch.Tensor]
) -> list[State]:
    """Return what `kind` has for ordinary parameters of a group after a step with zeros for them and their
    gradients."""
    zeros = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
    inner = borrow(optimizer, kind, group, zeros)
    for zero in zeros:
        zero.grad = torch.zeros_like(zero)
    with torch.no_grad():
        step_without_hooks(inner)
    return [inner.state[zero] for zero in zeros]


# What torch.optim's classes note on themselves when they have looked at their parameters for the first time.
_CHECKED_ONCE = {"_need_device_dtype_check_for_fused"}

_NOT_KEPT = {"param_groups", "state", "defaults", *_CHECKED_ONCE}


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values; tensors, lists and dicts are copies, which nothing that works in place reaches."""
    return {name: _copy(value) for name, value in values.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return copied(value)
    return [*map(_copy, value)] if type(value) is list else value


@dataclass(frozen=True)
class Kept:
    """What an optimizer has at a moment, or what changed of it.

    Attributes:
        groups: the options of each group, by name.
        attributes: the attributes of the optimizer itself.
    """

    groups: list[dict[str, Any]]
    attributes: dict[str, Any]

    @staticmethod
    def of(optimizer: Optimizer) -> Kept:
        groups = [copied({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        return Kept(groups, copied({k: v for k, v in vars(optimizer).items() if k not in _NOT_KEPT}))

    def since(self, before: Kept) -> Kept:
        """Return what is otherwise than `before`."""
        groups = [_changed(mine, earlier) for mine, earlier in zip(self.groups, before.groups, strict=True)]
        return Kept(groups, _changed(self.attributes, before.attributes))

    @property
    def options(self) -> set[str]:
        """The names of all options."""
        return {name for group in self.groups for name in group}

    def set_in(self, optimizer: Optimizer) -> None:
        """Let an optimizer with these groups have what this has."""
        for group, options in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(options)
        vars(optimizer).update(self.attributes)


def differing(moves: Iterable[Kept]) -> list[str]:
    """Return the names of what steps over different parameters changed differently: it depends on the parameters."""
    first, *rest = moves
    names: dict[str, None] = {}
    for move in rest:
        for mine, theirs in zip((*first.groups, first.attributes), (*move.groups, move.attributes), strict=True):
            names |= dict.fromkeys([*_changed(mine, theirs), *_changed(theirs, mine)])
    return list(names)


def _changed(values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k not in before or not same_value(v, before[k])}


def same_value(mine: object, theirs: object) -> bool:
    """Whether two options or attributes are the same object, or equal: numbers, texts, tensors, collections of them."""
    if mine is theirs:
        return True
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(same_value(value, theirs[name]) for name, value in mine.items())
    if isinstance(mine, (tuple, list)) and isinstance(theirs, (tuple, list)):
        return len(mine) == len(theirs) and all(map(same_value, mine, theirs))
    return isinstance(mine, (Number, str)) and (mine == theirs or (mine != mine and theirs != theirs))
