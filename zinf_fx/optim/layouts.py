"""What an optimizer's class keeps for each stored parameter, found by trying, once for what is alike.

The class steps a matrix and the same matrix in two pieces. Where the results differ, it is not element-wise: Adafactor,
Muon, Lamb and their like treat each parameter by itself, but a matrix as a matrix. They are run on one whole parameter
at a time, with its gradient and states in memory, and do there exactly what they do in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from zinf_fx.adam import SPLIT, MasterForm, StateForm
from zinf_fx.errors import OptimizerError
from zinf_fx.optim.arithmetic import (
    Group,
    Kept,
    State,
    borrow,
    differing,
    step_without_hooks,
)
from zinf_fx.optim.formats import (
    CODES,
    EIGHT_BITS,
    FORMS,
    LOWER,
    MASTER,
    MASTER_UP,
    SCALES,
    UPS,
    KeptAs,
    check_can_be_coded,
    check_can_be_split,
    companion_of,
)
from zinf_fx.optim.rehearsal import check_honoured
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import PAGE, at_least, at_most


@dataclass(frozen=True)
class StateLayout:
    """What a class keeps for each parameter under the options of one group.

    Attributes:
        tensors: the names and dtypes of the states that are streamed.
        scalars: the names and dtypes of those that stay in memory, mostly one number for the whole parameter (None: no
            tensor).
        non_elementwise: whether the update of an element depends on others, so that a parameter is updated whole.
        shapes: the shapes of states that have another one than the parameter, where that is updated whole.
        form: what element-wise states are kept in, where it isn't the class's own dtype.
        splits: whether masters are split.
    """

    tensors: Mapping[str, torch.dtype]
    scalars: Mapping[str, torch.dtype | None]
    non_elementwise: bool = False
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    form: StateForm | None = None
    splits: bool = False

    def stored_as(self, kept: KeptAs) -> StateLayout:
        """Return the layout with floating-point element-wise states no wider than they are to be; those of 8 bits have
        scales."""
        tensors, narrow = dict(self.tensors), kept.state_dtype
        for name, dtype in self.tensors.items():
            if narrow is None or not dtype.is_floating_point:
                continue
            if not isinstance(narrow, torch.dtype):
                tensors |= {name: CODES, companion_of(name): SCALES.dtype}
            elif dtype.itemsize > narrow.itemsize:
                tensors[name] = narrow
        form = None if narrow is None or tensors == self.tensors else FORMS[narrow]
        return StateLayout(MappingProxyType(tensors), self.scalars, form=form, splits=kept.splits)

    def of_master(self, own: torch.dtype, update: torch.dtype) -> dict[str, torch.dtype]:
        """Return what is kept of the master of a parameter of dtype `own` that is updated in `update`, by name: nothing
        of one that is its own master."""
        if own == update:
            return {}
        return {MASTER: LOWER, MASTER_UP: UPS.dtype} if self.splits else {MASTER: update}

    def master_form(self, own: torch.dtype, update: torch.dtype) -> MasterForm | None:
        """Return what the master is kept in, for plans, where it isn't the dtype of the update."""
        return SPLIT if MASTER_UP in self.of_master(own, update) else None

    def zeros(self) -> State:
        """Return zeros for the states that stay in memory."""

        def zero(name: str, dtype: torch.dtype | None) -> torch.Tensor | int:
            return 0 if dtype is None else torch.zeros(self.shapes.get(name, ()), dtype=dtype, device="cpu")

        return {name: zero(name, dtype) for name, dtype in self.scalars.items()}


def refusal(kind: type[Optimizer], reason: str) -> OptimizerError:
    """Return the error that says why a class can't be streamed at all."""
    return OptimizerError(
        f"{kind.__module__}.{kind.__qualname__} can't step over stored parameters: {reason}, and only optimizers that "
        "treat each parameter by itself can be streamed; use one of zinf_fx.optim, or placement='device', where any "
        "optimizer of PyTorch runs"
    )


class NotElementwise(OptimizerError):
    """Why an optimizer class can't be run on pieces of parameters."""


def probe(optimizer: Optimizer, kind: type[Optimizer], group: Group, dtype: torch.dtype) -> StateLayout:
    """Return the layout of `kind`'s states, from three steps over a matrix of `dtype` and over the same matrix in two
    pieces.

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
    """Borrow an optimizer to find out what the class does: a warm-up may start from a learning rate of 0, where every
    class looks alike, and a class that trains and evaluates in modes of its own is to train."""
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
        elif isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            if not all(isinstance(v, (Real, torch.Tensor)) and math.isclose(v, value) for v in of_parts):
                raise NotElementwise(f"its state '{name}' depends on all elements of a parameter")
            scalars[name] = value.dtype if isinstance(value, torch.Tensor) else None
        elif value is not None:
            raise NotElementwise(f"its state '{name}' is neither a number nor of the parameter's shape")
    return StateLayout(MappingProxyType(elementwise), MappingProxyType(scalars))


def same_values(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Whether the elements of `parts`, in a row, are those of `whole`, but for rounding."""
    together = torch.cat([part.flatten() for part in parts])
    return together.numel() == whole.numel() and torch.allclose(whole.flatten(), together, rtol=1e-4, equal_nan=True)


# Bytes from which on states of another shape than the parameter's are stored; smaller ones stay in memory.
STORED_FROM_BYTES = PAGE

# Values that a class may read in a step over tensors without any: one that reads until something comes out won't end.
_READS = 1000


def non_elementwise_layout(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, parameter: StoredTensor, dtype: torch.dtype
) -> StateLayout:
    """Return the layout of `kind`'s states for a parameter that is updated in `dtype`, from one step over one of its
    shape: over tensors without memory or, where the class can't do that, in memory.

    Raises: OptimizerError for a class that can't run on one parameter at a time, or a parameter for which there is no
    room.
    """
    _check_independent(optimizer, kind, group, parameter.shape, dtype)
    shape = parameter.shape
    try:
        with _WithoutValues():
            states = _states_of_one(optimizer, kind, group, torch.empty(shape, dtype=dtype, device="meta"))
    except OptimizerError:
        check_room(parameter, 2 * shape.numel() * dtype.itemsize)  # with its gradient
        states = _states_of_one(optimizer, kind, group, torch.full(shape, 0.5, dtype=dtype, device="cpu"))
    tensors: dict[str, torch.dtype] = {}
    shapes: dict[str, torch.Size] = {}
    scalars: dict[str, torch.dtype | None] = {}
    for name, value in states.items():
        if isinstance(value, torch.Tensor) and is_stored(value, shape):
            tensors[name] = value.dtype
        elif value is not None:
            scalars[name] = value.dtype if isinstance(value, torch.Tensor) else None
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
            shapes[name] = value.shape
    return StateLayout(
        MappingProxyType(tensors), MappingProxyType(scalars), non_elementwise=True, shapes=MappingProxyType(shapes)
    )


def _states_of_one(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, parameter: torch.Tensor
) -> Mapping[str, Any]:
    """Return what `kind` keeps for a parameter after one step. Raises: OptimizerError when that fails."""
    inner = borrow_for_trial(optimizer, kind, group, [parameter])
    _step(kind, [inner], [[torch.full_like(parameter, 0.25)]])
    return inner.state[parameter]


class _WithoutValues(TorchDispatchMode):
    """In the block, a number that is read from a tensor on the device "meta" is one."""

    def __init__(self) -> None:
        super().__init__()
        self._reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is not torch.ops.aten._local_scalar_dense.default or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        self._reads += 1
        if self._reads > _READS:
            raise OptimizerError(f"a step read values of tensors that have none, more than {_READS} times")
        return torch.ones((), dtype=args[0].dtype, device="cpu").item()


def is_stored(value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a state of a parameter of `shape` lives on the tier of optimizer states."""
    return (value.shape == shape and value.dim() > 0) or value.nbytes >= STORED_FROM_BYTES


def _check_independent(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Take three steps over two small parameters together and over each alone. Raises: OptimizerError if they
    differ."""
    small = [min(size, 3 + index) for index, size in enumerate(shape)]
    numel = torch.Size(small).numel()
    ramp = partial(torch.linspace, -1, steps=numel, dtype=dtype, device="cpu")
    values = [ramp(end).exp().view(small) for end in (1, 2)]
    together = borrow_for_trial(optimizer, kind, group, [value.clone() for value in values])
    alone = [borrow_for_trial(optimizer, kind, group, [value.clone()]) for value in values]
    for step in range(3):
        gradients = [ramp(end).roll(5 * step).view(small) for end in (3, 1)]
        moves = _step(kind, (together, *alone), (gradients, *([gradient] for gradient in gradients)))
        check_moves(moves, partial(refusal, kind))
    for inner in (together, *alone):
        for owner, states in inner.state.items():
            if not isinstance(owner, torch.Tensor):
                raise refusal(kind, f"its state '{owner}' is of no parameter")
            kept = [k for k, v in states.items() if not isinstance(v, torch.Tensor) and _has_tensors(v)]
            if kept:
                raise refusal(kind, f"its state '{kept[0]}' is a collection of tensors")
    parameters = [inner.param_groups[0]["params"][0] for inner in alone]
    if any(not same_values(mine, [value]) for mine, value in zip(together.param_groups[0]["params"], parameters)):  # noqa: B905
        raise refusal(kind, "its update of a parameter depends on other parameters")


def _has_tensors(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_iter(value))


def _step(
    kind: type[Optimizer], inners: Sequence[Optimizer], gradients: Sequence[Sequence[torch.Tensor]]
) -> list[Kept]:
    """Step each of some borrowed optimizers, with gradients. Returns what changed besides parameters and states."""
    for inner, given in zip(inners, gradients, strict=True):
        for parameter, gradient in zip(inner.param_groups[0]["params"], given, strict=True):
            parameter.grad = gradient.clone()
    try:
        with torch.no_grad():
            return step_of_each(inners)
    except Exception as error:
        raise refusal(kind, f"a step over one parameter failed ({type(error).__name__}: {error})") from error


def check_non_elementwise(
    kind: type[Optimizer], parameter: StoredTensor, *, in_backward: bool, narrowed: Sequence[str]
) -> None:
    """Raises: OptimizerError where the update of a whole parameter is asked for what it can't do. `narrowed` are the
    options that ask for other forms of what it keeps."""
    shape, storage = tuple(parameter.shape), parameter.stored
    why = f"{kind.__qualname__} updates whole parameters"
    if parameter.whole is not parameter:
        raise OptimizerError(
            f"{why}, and one is a DTensor of tensor parallelism, of which this rank has shape {shape}: use one "
            "that treats each element alone, such as zinf_fx.optim.AdamW"
        )
    if in_backward and storage.shard.ranks.shards > 1:
        raise OptimizerError(f"{why}, which takes all ranks at the same time: leave step_in_backward out")
    if narrowed:
        raise OptimizerError(f"{why}, whose states keep the dtypes that it gives them: leave {narrowed[0]} out")


# Options whose value has nothing to do with what a class keeps, and those of which only whether they are zero has: a
# class may leave something out then. Schedules change them at every step.
_ANY_VALUE = {"params", "param_names", "lr", "initial_lr"}

_ZERO_OR_NOT = {"momentum", "betas", "weight_decay"}

# Options of groups that are remembered; a schedule of other ones makes new ones at every step.
_REMEMBERED = 64

OfShapes = dict[torch.Size | None, StateLayout | None]
"""Layouts of whole parameters by shape; under None that of pieces, if the class can update pieces."""


class Layouts:
    """Layouts of the states of class `kind`, by what they depend on."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        # By the options of a group and the dtype: of pieces under None, of whole parameters by shape, as many as a
        # model has.
        self._known: dict[tuple[str, torch.dtype], OfShapes] = {}

    def under(
        self, optimizer: Optimizer, group: Group, kept: KeptAs, moving: Set[str], *, in_backward: bool
    ) -> GroupLayouts:
        """Return the layouts under the present options of `group`, but for the `moving` ones, which the class changes
        at each step. `in_backward` says whether backward is to update parameters.

        Raises: OptimizerError for options that can't be honoured.
        """
        check_honoured(group)
        kept_alike = _ANY_VALUE | moving
        options = repr(
            [(k, _zero_or_not(v) if k in _ZERO_OR_NOT else v) for k, v in group.items() if k not in kept_alike]
        )

        def known(dtype: torch.dtype) -> OfShapes:
            of_shapes: OfShapes | None = self._known.get((options, dtype))
            if of_shapes is None:
                of_shapes = {None: _of_pieces(optimizer, self._kind, group, dtype, kept)}
                self._known = {(options, dtype): of_shapes, **dict(list(self._known.items())[: _REMEMBERED - 1])}
            return of_shapes

        return GroupLayouts(optimizer, self._kind, group, known, kept, in_backward=in_backward)


def _zero_or_not(value: object) -> object:
    """Return what is left of an option's number, or of several, when it matters only whether they are zero."""
    return [number and True for number in value] if isinstance(value, (tuple, list)) else value and True


def _of_pieces(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, dtype: torch.dtype, kept: KeptAs
) -> StateLayout | None:
    try:
        layout = probe(optimizer, kind, group, dtype)
    except NotElementwise:
        return None
    return layout.stored_as(kept)


class GroupLayouts:
    """Layouts under the options that a group has at a moment."""

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Optimizer],
        group: Group,
        find: Callable[[torch.dtype], OfShapes],
        kept: KeptAs,
        *,
        in_backward: bool,
    ) -> None:
        """`find` returns what is known of updates in a dtype."""
        self._optimizer, self._kind, self._group, self._find = optimizer, kind, group, find
        self._kept, self._in_backward = kept, in_backward

    def of_pieces(self, dtype: torch.dtype) -> StateLayout | None:
        """Return the layout of parameters that are updated in `dtype`, each element by itself; None where the class
        updates whole parameters."""
        return self._find(dtype)[None]

    def of(self, parameter: StoredTensor, dtype: torch.dtype) -> StateLayout:
        """Return the layout of `parameter`, updated in `dtype`. Raises: OptimizerError for what can't be streamed."""
        if (layout := self.of_pieces(dtype)) is not None:
            if self._kept.state_dtype == EIGHT_BITS:
                check_can_be_coded(parameter, dtype)
            if layout.of_master(parameter.dtype, dtype) and self._kept.splits:
                check_can_be_split(parameter)
            return layout
        check_non_elementwise(self._kind, parameter, in_backward=self._in_backward, narrowed=self._kept.narrowed)
        known, shape = self._find(dtype), parameter.shape
        layout = known.get(shape)
        if layout is None:
            layout = known[shape] = non_elementwise_layout(self._optimizer, self._kind, self._group, parameter, dtype)
        return layout


def check_room(parameter: StoredTensor, needed: int) -> None:
    """Raises: OptimizerError when the host arena can't have so many bytes for the update of a parameter at once."""
    arena = parameter.stored.tiers.host
    if needed > arena.capacity:
        raise OptimizerError(
            f"a parameter of shape {tuple(parameter.shape)} is updated whole, which takes {at_least(needed)} of host "
            f"memory, and host_memory is {at_most(arena.capacity)}: give it more, or use one that treats each element "
            "alone, such as zinf_fx.optim.AdamW"
        )
