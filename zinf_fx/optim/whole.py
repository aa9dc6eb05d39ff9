"""Optimizers whose update of an element depends on others: a parameter, its gradient and states are in memory whole.

Adafactor, Muon, Lamb and their like treat each parameter by itself, but a matrix as a matrix. So they are run on one
whole parameter at a time, and do there exactly what they do in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from zinf_fx.errors import OptimizerError
from zinf_fx.optim.arithmetic import (
    Group,
    StateLayout,
    borrow_for_trial,
    check_moves,
    refusal,
    same_values,
    step_of_each,
)
from zinf_fx.optim.chunks import Piece
from zinf_fx.optim.companions import MASTER
from zinf_fx.optim.elements import AnyWindow, open_window
from zinf_fx.optim.moving import Kept
from zinf_fx.optim.part import Begun, OpenPart
from zinf_fx.optim.states import ParameterStates, State, check_room
from zinf_fx.runtime.memory.device import Device
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window
from zinf_fx.sizes import PAGE

# Bytes from which on states of another shape than the parameter's are stored; smaller ones stay in memory.
STORED_FROM_BYTES = PAGE


# Values that a class may read in a step over tensors without any: one that reads until something comes out won't end.
_READS = 1000


def whole_layout(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, parameter: StoredTensor, dtype: torch.dtype
) -> StateLayout:
    """The layout of `kind`'s states for a parameter that is updated in `dtype`, from one step over one of its shape: of
    tensors without memory or, where the class can't do that, in memory.

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
        if isinstance(value, torch.Tensor) and _is_stored(value, shape):
            tensors[name] = value.dtype
        elif value is not None:
            scalars[name] = value.dtype if isinstance(value, torch.Tensor) else None
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
            shapes[name] = value.shape
    return StateLayout(
        MappingProxyType(tensors), MappingProxyType(scalars), whole=True, shapes=MappingProxyType(shapes)
    )


def _states_of_one(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, parameter: torch.Tensor
) -> Mapping[str, Any]:
    """What `kind` keeps for a parameter after one step. Raises: OptimizerError when that fails."""
    inner = borrow_for_trial(optimizer, kind, group, [parameter])
    _step(kind, [inner], [[torch.full_like(parameter, 0.25)]])
    return inner.state[parameter]


class _WithoutValues(TorchDispatchMode):
    """In the block, a number that is read from a tensor on the device "meta" is one."""

    def __init__(self) -> None:
        super().__init__()
        self._reads = 0

    def __torch_dispatch__(
        self, operation: torch._ops.OpOverload, types: Sequence[type], args: tuple, kwargs: dict[str, Any] | None = None
    ) -> object:
        if operation is not torch.ops.aten._local_scalar_dense.default or not args[0].is_meta:
            return operation(*args, **(kwargs or {}))
        self._reads += 1
        if self._reads > _READS:
            raise OptimizerError(f"a step read values of tensors that have none, more than {_READS} times")
        return torch.ones((), dtype=args[0].dtype, device="cpu").item()


def _is_stored(value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a state of a parameter of `shape` lives on the tier of optimizer states."""
    return (value.shape == shape and value.dim() > 0) or value.nbytes >= STORED_FROM_BYTES


def _check_independent(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Three steps over two small parameters together and over each alone. Raises: OptimizerError if they differ."""
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
    if any(not same_values(one, [other]) for one, other in zip(together.param_groups[0]["params"], parameters)):  # noqa: B905
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


def check_can_be_whole(
    kind: type[Optimizer], parameter: StoredTensor, *, in_backward: bool, narrowed: Sequence[str]
) -> None:
    """Raises: OptimizerError where the update of a whole parameter is asked for what it can't do. `narrowed`: options
    that ask for other forms of what it keeps."""
    shape, storage = tuple(parameter.shape), parameter.storage
    why = f"{kind.__qualname__} updates whole parameters"
    if parameter.whole is not parameter:
        raise OptimizerError(
            f"{why}, and one is a DTensor of tensor parallelism, of which this rank has shape {shape}: use one "
            "that treats each element alone, such as zinf_fx.optim.AdamW"
        )
    if in_backward and storage.share.ranks.shards > 1:
        raise OptimizerError(f"{why}, which takes all ranks at the same time: leave step_in_backward out")
    if narrowed:
        raise OptimizerError(f"{why}, whose states keep the dtypes that it gives them: leave {narrowed[0]} out")


class _Gathered:
    """The part of a `Window` that an `OpenWhole` uses, over the full value of a tensor of which this rank has a share.

    Waiting is collective.
    """

    ready = is_current = True

    def __init__(self, tensor: StoredTensor, place: Device) -> None:
        self._tensor, self._place = tensor, place
        self._value: torch.Tensor | None = None

    def arrived(self) -> None:
        """Nothing is under way yet."""

    def wait(self) -> torch.Tensor:
        """All elements, 1-D."""
        if self._value is None:
            self._value = self._tensor.storage.value().to(self._place.torch_device)
        return self._value

    def store(self) -> None:
        """Write this rank's share."""
        self._tensor.storage.set(self.wait())

    def close(self) -> None:
        """Drop the value."""
        self._value = None


class OpenWhole(OpenPart):
    """A whole parameter, everything in its own shape, for one update.

    `names` are known once `end` was called.
    """

    def __init__(self, piece: Piece[ParameterStates], names: Iterable[str], present: Set[str]) -> None:
        super().__init__(piece, [name for name in names if name in present], present)
        self._made: dict[str, torch.Tensor] = {}

    def begin(self, elements: slice, scalars: State, scratch: torch.Tensor | None) -> Begun:
        """As of `OpenPiece`; `elements` are all, and everything has its own shape."""
        stored = self.piece.owner
        shape = stored.parameter.shape
        weights = self._updated.view(shape)
        weights.grad = self._gradient.wait().view(shape).to(weights.dtype)
        memory = {name: window.wait().view(stored.tensors[name].shape) for name, window in self._states.items()}
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in scalars.items()} | memory
        return Begun(elements, weights, state, memory)

    def end(self, begun: Begun, state: State) -> State:
        """Put the updated weights and states where they will be stored from. Returns the states that stay in memory."""
        begun.weights.grad = None
        updated = self._updated
        if begun.weights.data_ptr() != updated.data_ptr():  # `.data` was assigned
            updated.copy_(begun.weights.reshape(-1))
        if self._master:
            self._parameter.wait().copy_(updated)
        rest: State = {}
        for name, value in state.items():
            memory = begun.memory.get(name)
            if memory is not None and value.shape == memory.shape and value.dtype == memory.dtype:
                if value is not memory:
                    memory.copy_(value)
            elif isinstance(value, torch.Tensor) and _is_stored(value, self.piece.owner.parameter.shape):
                self._made[name] = value
            else:
                rest[name] = value
        self.names = (*(name for name in begun.memory if name in state and name not in self._made), *self._made)
        return rest

    @property
    def _updated(self) -> torch.Tensor:
        """What the class updates; flat. A split master is refused: see `check_can_be_whole`."""
        return (self._master[MASTER] if self._master else self._parameter).wait()

    def store(self, unscaled: bool) -> None:
        super().store(unscaled)
        for name, value in self._made.items():
            self.piece.owner.put(name, value)

    def close(self) -> None:
        self._made = {}
        super().close()

    def _open(self, tensor: StoredTensor, load: bool, state: str = "") -> Window | DeviceWindow | _Gathered:
        if tensor.storage.share.in_shares:
            return self._keep(_Gathered(tensor, self._place))
        return self._keep(open_window(tensor.storage, self._place, 0, tensor.numel(), load=load))

    def _open_gradient(self, gradient: torch.Tensor) -> AnyWindow | _Gathered:
        in_shares = isinstance(gradient, StoredTensor) and not gradient.views and gradient.storage.share.in_shares
        return _Gathered(gradient, self._place) if in_shares else super()._open_gradient(gradient)
