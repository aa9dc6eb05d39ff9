"""PyTorch's own optimizers do the arithmetic: on flat pieces of parameters, and once on a few elements as a probe."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from numbers import Number
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.adam import SPLIT, MasterForm, StateForm
from zinf_fx.errors import OptimizerError
from zinf_fx.optim.companions import CODES, LOWER, MASTER, MASTER_UP, SCALES, UPS, companion_of
from zinf_fx.optim.forms import EIGHT_BITS, KeptAs
from zinf_fx.optim.moving import Kept, copied, differing

# Attributes that no class of arithmetic changes in place, and that may have an entry for each parameter.
_HANDED_ON = {"param_groups", "state", "defaults", "_state", "_groups"}

Group = dict[str, Any]
"""One of an optimizer's `param_groups`: its options, and the parameters under "params"."""

State = dict[str, Any]
"""What an optimizer's `state` has for one parameter: tensors and numbers by name."""


def snapshot(group: Group) -> Group:
    """The group's options at this moment: a scheduler may change them while the step goes on."""
    return copied({k: v for k, v in group.items() if k != "params"})


def as_groups(params: Iterable[Any]) -> list[Group]:
    """Parameters, as every torch optimizer takes them, in groups."""
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
    """An optimizer of class `kind` over `parameters`, with everything else as `optimizer` has it at this moment.

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
    """The attributes of `optimizer`, less its hooks: those may hold it, and what has its attributes may outlive it."""
    return {k: v for k, v in vars(optimizer).items() if not (k.startswith("_optimizer_") and k.endswith("_hooks"))}


def step_without_hooks(inner: Optimizer) -> None:
    """`inner.step()` as its class wrote it: torch wraps `step` so that it runs hooks, which are for whole steps."""
    step = type(inner).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    if isinstance(inner, torch.optim.Adagrad):
        _give_first_states(inner)
    step(inner)


class Lists:
    """What a class of torch.optim lists at the begin of each step (`_init_group`): its parameters, their gradients, and
    what is in their states. While the states have the same objects, only the gradients are others."""

    def __init__(self) -> None:
        self._known: tuple[object, list[tuple[object, ...]]] | None = None  # what it returns, and all but gradients

    @contextmanager
    def served(
        self, inner: Optimizer, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> Iterator[bool]:
        """In the block, `inner`, a class over `weights`, has these gradients: in its lists, where these are known; else
        each in the weight's `grad`, and what its class makes of them is noted. Yields whether they are known."""
        known, makes = self._known, type(inner).__module__.startswith("torch.optim.") and hasattr(inner, "_init_group")

        def give(group: Group, *lists: list[object]) -> object:
            result, (parameters, *states) = known
            for some, values in zip(lists, (parameters, gradients, *states), strict=True):
                some.extend(values)
            return result

        def note(group: Group, *lists: list[object]) -> object:
            result = type(inner)._init_group(inner, group, *lists)
            parameters, _, *states = map(tuple, lists)
            self._known = result, [parameters, *states]
            return result

        if makes:  # another class may look at the parameters elsewhere, too
            inner._init_group = note if known is None else give
        try:
            for weight, gradient in zip(weights, gradients, strict=True) if known is None else ():
                weight.grad = gradient
            yield known is not None
        finally:
            vars(inner).pop("_init_group", None)  # which holds it
            for weight in weights if known is None else ():
                weight.grad = None

    def forget(self) -> None:
        """There are other objects in the states."""
        self._known = None


def step_together(
    inner: Optimizer,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    state: defaultdict[torch.Tensor, State],
    values: Sequence[object],
    lists: Lists,
) -> bool:
    """A step of `inner`, borrowed without parameters, over `weights` and their `state`.

    `values`: all that is in the state. `lists`: those of the last step with the same. Returns whether the same objects
    are all that is in it afterwards.
    """
    inner.param_groups[0]["params"] = list(weights)
    inner.state = state
    with lists.served(inner, weights, gradients) as known:
        step_without_hooks(inner)
    # A class that is given its lists works on what is in them, and puts nothing else in the states.
    same = known or same_objects(values_of(state.values()), values)
    if not same:
        lists.forget()
    return same


def values_of(states: Iterable[State]) -> list[object]:
    """All values of some entries."""
    return list(chain.from_iterable(map(dict.values, states)))


def same_objects(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether they are the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def show(entry: State, scalars: State) -> None:
    """Have a state show what isn't stored, as torch does: tensors in place, so that a batch comes again."""
    for name, value in scalars.items():
        shown = entry.get(name)
        if isinstance(shown, torch.Tensor) and (shown.shape, shown.dtype) == (value.shape, value.dtype):
            shown.copy_(value)
        else:
            entry[name] = value


def _give_first_states(inner: torch.optim.Adagrad) -> None:
    """States of parameters without any. Up to torch 2.11, Adagrad makes them at construction, and no step does."""
    for group in inner.param_groups:
        new = [p for p in group["params"] if p.grad is not None and not inner.state[p]]
        if new:
            options = {name: group[name] for name in inner.defaults if name in group}
            inner.state.update(torch.optim.Adagrad(new, **options).state)


def step_groups(optimizer: Optimizer, kind: type[Optimizer], groups: list[Group], state: Mapping[Any, Any]) -> None:
    """A step of class `kind` over the parameters in `groups`, if any, in memory, as `optimizer` would have it."""
    if groups:
        inner = borrow(optimizer, kind, {}, [])
        inner.param_groups, inner.state = groups, state
        step_without_hooks(inner)


def states_of_zeros(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, parameters: Sequence[torch.Tensor]
) -> list[State]:
    """What `kind` has for ordinary parameters of a group after a step with zeros for them and their gradients."""
    zeros = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
    inner = borrow(optimizer, kind, group, zeros)
    for zero in zeros:
        zero.grad = torch.zeros_like(zero)
    with torch.no_grad():
        step_without_hooks(inner)
    return [inner.state[zero] for zero in zeros]


@dataclass(frozen=True)
class StateLayout:
    """What a class keeps for each parameter under the options of one group.

    Attributes:
        tensors: names and dtypes of the states that are streamed.
        scalars: names and dtypes of those that stay in memory, mostly one number for the whole parameter (None: no
            tensor).
        whole: whether the update of an element depends on others, so that a parameter is updated whole.
        shapes: of the states that are tensors of another shape than the parameter's, where it is updated whole.
        form: what element-wise states are kept in, where it isn't the class's own dtype.
        splits: whether masters are split.
    """

    tensors: Mapping[str, torch.dtype]
    scalars: Mapping[str, torch.dtype | None]
    whole: bool = False
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    form: StateForm | None = None
    splits: bool = False

    def stored_as(self, kept: KeptAs) -> StateLayout:
        """The same, with floating-point element-wise states no wider than they are to be; of 8 bits, with scales."""
        tensors, narrow = dict(self.tensors), kept.state_dtype
        for name, dtype in self.tensors.items() if narrow is not None else ():
            if narrow == EIGHT_BITS and dtype.is_floating_point:
                tensors |= {name: CODES, companion_of(name): SCALES.dtype}
            elif narrow != EIGHT_BITS and dtype.is_floating_point and dtype.itemsize > narrow.itemsize:
                tensors[name] = narrow
        form = str(narrow).removeprefix("torch.") if tensors != self.tensors else None
        return StateLayout(MappingProxyType(tensors), self.scalars, form=form, splits=kept.splits)

    def of_master(self, own: torch.dtype, update: torch.dtype) -> dict[str, torch.dtype]:
        """What is kept of the master of a parameter of dtype `own` that is updated in `update`, by name: nothing of one
        that is its own."""
        if own == update:
            return {}
        return {MASTER: LOWER, MASTER_UP: UPS.dtype} if self.splits else {MASTER: update}

    def master_form(self, own: torch.dtype, update: torch.dtype) -> MasterForm | None:
        """For plans, where it isn't the dtype of the update."""
        return SPLIT if MASTER_UP in self.of_master(own, update) else None

    def zeros(self) -> State:
        """Zeros for the states that stay in memory."""

        def zero(name: str, dtype: torch.dtype | None) -> torch.Tensor | int:
            return 0 if dtype is None else torch.zeros(self.shapes.get(name, ()), dtype=dtype, device="cpu")

        return {name: zero(name, dtype) for name, dtype in self.scalars.items()}


def refusal(kind: type[Optimizer], reason: str) -> OptimizerError:
    """Why a class can't be streamed at all."""
    return OptimizerError(
        f"{kind.__module__}.{kind.__qualname__} can't step over stored parameters: {reason}, and only optimizers that "
        "treat each parameter by itself can be streamed; use one of zinf_fx.optim, or placement='device', where any "
        "optimizer of PyTorch runs"
    )


class NotElementwise(OptimizerError):
    """Why an optimizer class can't be run on pieces of parameters."""


def probe(optimizer: Optimizer, kind: type[Optimizer], group: Group, dtype: torch.dtype) -> StateLayout:
    """The layout of `kind`'s states, from three steps over a matrix of `dtype` and over the same matrix in two pieces.

    Raises: NotElementwise when the pieces don't come out as the whole does.
    """
    # Classes may treat small matrices as if they were element-wise, and those that aren't of whole blocks.
    rows, columns, steps = 256, 512, 3
    elements = rows * columns
    flat = torch.linspace(-1, 1, elements, dtype=dtype, device="cpu").exp()
    whole = borrow_for_trial(optimizer, kind, group, [flat.view(rows, columns).clone()])
    pieces = [borrow_for_trial(optimizer, kind, group, [piece.clone()]) for piece in flat.chunk(2)]
    together = borrow_for_trial(optimizer, kind, group, [piece.clone() for piece in flat.chunk(2)])
    try:
        for step in range(steps):
            gradient = torch.linspace(-1, 3, elements, dtype=dtype, device="cpu").roll(5 * step)
            parts = gradient.chunk(2)
            given = ((whole, [gradient]), (together, parts), *((inner, [part]) for inner, part in zip(pieces, parts)))  # noqa: B905
            for inner, gradients in given:
                for parameter, value in zip(inner.param_groups[0]["params"], gradients, strict=True):
                    parameter.grad = value.clone().view(parameter.shape)
            check_moves(step_of_each([inner for inner, _ in given]), NotElementwise)
    except OptimizerError:
        raise
    except Exception as error:
        raise NotElementwise(f"a step over a piece of a parameter failed ({type(error).__name__}: {error})") from error
    return _compare(whole, pieces)


def borrow_for_trial(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, parameters: Sequence[torch.Tensor]
) -> Optimizer:
    """As `borrow`, to find out what the class does: a warm-up may start from a learning rate of 0, where every class
    looks alike, and a class that trains and evaluates in modes of its own is to train."""
    inner = borrow(optimizer, kind, group, parameters)
    (options,) = inner.param_groups
    if (lr := options.get("lr")) is not None:
        options["lr"] = torch.full_like(lr, 0.01) if isinstance(lr, torch.Tensor) else 0.01
    if callable(train := getattr(inner, "train", None)):
        train()
    return inner


def step_of_each(inners: Sequence[Optimizer]) -> list[Kept]:
    """Step each of some borrowed optimizers. Returns what that changed besides parameters and states."""
    moves = []
    for inner in inners:
        before = Kept.of(inner)
        step_without_hooks(inner)
        moves.append(Kept.of(inner).since(before))
    return moves


def check_moves(moves: Sequence[Kept], refused: Callable[[str], OptimizerError]) -> None:
    """Raises: what `refused` makes of the reason, where steps over different parameters changed different things
    besides these parameters and their states: the optimizer that was borrowed would not know what to keep."""
    if changed := differing(moves):
        raise refused(f"it keeps state that depends on all parameters ({', '.join(changed)})")


def _compare(whole: Optimizer, pieces: Sequence[Optimizer]) -> StateLayout:
    (parameter,) = whole.param_groups[0]["params"]
    parts = [inner.param_groups[0]["params"][0] for inner in pieces]
    states = [inner.state[part] for inner, part in zip(pieces, parts, strict=True)]
    for owner in whole.state:
        if owner is not parameter:
            raise NotElementwise(f"its state '{owner}' is of no parameter")
    if not same_values(parameter, parts):
        raise NotElementwise("its update of an element depends on other elements")
    elementwise: dict[str, torch.dtype] = {}
    scalars: dict[str, torch.dtype | None] = {}
    for name, value in whole.state[parameter].items():
        of_parts = [state.get(name) for state in states]
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise refusal(
                type(whole),
                f"its state '{name}' is a {type(value).__name__}, made of several tensors (zinf_fx.optim.AdamW(..., "
                "state_dtype='8bit') keeps moments of a byte each)",
            )
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            if not all(isinstance(v, torch.Tensor) for v in of_parts) or not same_values(value, of_parts):
                raise NotElementwise(f"its state '{name}' isn't the same for a part of a parameter")
            elementwise[name] = value.dtype
        elif isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            if not all(isinstance(v, (Number, torch.Tensor)) and math.isclose(v, value) for v in of_parts):
                raise NotElementwise(f"its state '{name}' depends on all elements of a parameter")
            scalars[name] = value.dtype if isinstance(value, torch.Tensor) else None
        elif value is not None:
            raise NotElementwise(f"its state '{name}' is neither a number nor of the parameter's shape")
    return StateLayout(MappingProxyType(elementwise), MappingProxyType(scalars))


def same_values(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Whether the elements of `parts`, in a row, are those of `whole`, but for rounding."""
    together = torch.cat([part.flatten() for part in parts])
    return together.numel() == whole.numel() and torch.allclose(whole.flatten(), together, rtol=1e-4, equal_nan=True)
