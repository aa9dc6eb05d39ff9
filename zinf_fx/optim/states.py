"""Where an optimizer's tensors of stored parameters live."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property

import torch

from zinf_fx.errors import OptimizerError, StoreError
from zinf_fx.interrupts import held_back
from zinf_fx.optim.arithmetic import State
from zinf_fx.optim.elements import copy_into
from zinf_fx.optim.formats import (
    MASTER,
    MASTER_UP,
    companion_of,
    decode_into,
    encode_into,
    has_companion,
    kind_of,
    part_of,
)
from zinf_fx.optim.layouts import StateLayout, check_room
from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.gradients.state import GradientState, state_of
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_parameter import local_part
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.storage import TensorStorage, new_scales, new_states
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

log = logging.getLogger("zinf_fx")

_MASTERS = (MASTER, MASTER_UP)


def working_dtype(parameter: StoredTensor) -> torch.dtype:
    """Return the dtype of the update: fp32 for low-precision parameters (mixed precision, ZeRO section 3.1), else their
    own.

    Raises: OptimizerError for what can't be updated in pieces: a view, or a dtype that isn't real floating-point.
    """
    if parameter.views:
        raise OptimizerError(
            f"a tensor of shape {tuple(parameter.shape)} to optimize is a view of a stored tensor: pass the parameter"
        )
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        instead = "; torch.optim's step over complex ones where all states of the model live on the device"
        raise OptimizerError(
            f"a stored parameter of shape {tuple(parameter.shape)} has dtype {parameter.dtype}: accepted are "
            f"float64, float32, bfloat16 and float16{instead if parameter.dtype.is_complex else ''}"
        )
    return parameter.dtype if parameter.dtype.itemsize >= 4 else torch.float32


def check_reduced(parameter: StoredTensor) -> None:
    """Raises: OptimizerError for a gradient that this rank has not shared with the others yet."""
    if state_of(parameter.grad) is GradientState.LOCAL:
        raise OptimizerError(
            f"the gradient of a stored parameter of shape {tuple(parameter.shape)} is of this rank alone: it was "
            "accumulated under no_sync, or before the model was offloaded, and no backward pass outside of no_sync "
            "has reached the parameter since; run one before step(), or clear the gradient"
        )


def check_gradient(parameter: StoredTensor) -> None:
    """Raises: OptimizerError for a gradient that `check_reduced` refuses, or that isn't dense."""
    check_reduced(parameter)
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise OptimizerError(
            f"the gradient of a stored parameter of shape {tuple(parameter.shape)} has layout "
            f"{gradient.layout}: only dense gradients can be streamed (sparse=False)"
        )


def place_of(parameter: StoredTensor) -> Device:
    """Return what updates a parameter: its device where the states live there, else the CPU (ZeRO-Offload)."""
    storage = parameter.stored
    return storage.device if storage.placement.optimizer == "device" else CPU


def fitting(entry: State, layout: StateLayout, parameter: StoredTensor, dtype: torch.dtype, loads: str) -> State:
    """Return a loaded entry, less what a parameter that is updated in `dtype` has no use for. `loads` is the name of
    the class.

    Raises: OptimizerError if it can't be right.
    """
    unused = (MASTER, MASTER_UP) if dtype == parameter.dtype else ()
    entry = {name: local_part(value) for name, value in entry.items() if value is not None and name not in unused}
    shape = tuple(parameter.shape)
    kinds = {name: kind_of(name, {MASTER, *layout.tensors}) for name in [*layout.tensors, *layout.shapes, *_MASTERS]}
    needed = {name for name in (*layout.tensors, *layout.scalars) if kinds.get(name) is None}
    needed |= _companions(entry)
    if entry and (missing := sorted(needed - entry.keys())):
        raise OptimizerError(
            f"the state to load for a parameter of shape {shape} lacks {', '.join(missing)}: it has "
            f"{', '.join(sorted(entry))}, so it was saved by another class of optimizer than {loads}"
        )
    for name, kind in kinds.items():
        expected = layout.shapes.get(name, shape if kind is None else kind.shape(shape))
        if name in entry and tuple(entry[name].shape) != tuple(expected):
            raise OptimizerError(
                f"the state '{name}' to load has shape {tuple(entry[name].shape)}, its parameter {shape}: the "
                "parameters are in another order, or of another model"
            )
    return entry


def _scalar(value: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """Return a loaded state that stays in memory as a tensor of its own, of `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype, copy=True)
    return torch.tensor(value, dtype=dtype, device="cpu")


def _companions(entry: State) -> set[str]:
    """Return the names of the companions that states in an entry have."""
    states = (name for name in entry if kind_of(name, entry) is None)
    return {companion_of(name) for name in states if has_companion(entry[name])}


class ParameterStates:
    """Reserved space for the states of one stored parameter, on the tier of optimizer states; their companions are in
    memory.

    Attributes:
        place: the device that updates the parameter.
        tensors: the states by name. One holds a value only while the optimizer's `state` shows it.
        version: the version of the parameter's bytes when the master last agreed with them; None when that isn't known.
        refresh: whether this step takes over into the master what the parameter holds.
        gradient: what this step consumes; None between steps. The parameter's `grad` may be another one by then.
        updated: the elements that this rank updates: all, or its shard.
        count: how many elements these are.
    """

    updated: tuple[range, ...]
    count: int

    def __init__(
        self, parameter: StoredTensor, dtype: torch.dtype, spaces: dict[str, TensorStorage] | None = None
    ) -> None:
        """The update is in `dtype`. `spaces` has what is reserved already, by the name of the state."""
        self._spaces = spaces or {}
        # For which layout, in which dtype, of a parameter with which key there is room.
        self._reserved: tuple[StateLayout, torch.dtype, int] | None = None
        self.parameter, self._shape = parameter, parameter.shape
        self.place = place_of(parameter)
        self.tensors: dict[str, StoredTensor] = {}
        self.version: int | None = None
        self._joined_with: int | None = None  # the version with which a split master became one of fp32
        self.refresh = True
        self.gradient: torch.Tensor | None = None
        self.dtype = dtype

    def look_for_writes(self, present: Collection[str]) -> None:
        """Find out whether this step has to `refresh` the master. `present` has the names of the states with values."""
        version = self.parameter.stored.bytes.version
        self.refresh = self.version != version or not set(self.masters).issubset(present)
        if self._joined_with not in (None, version):
            log.warning(
                "a parameter of shape %s was written to after the state of its optimizer was loaded, whose split "
                "master became one of fp32 with the weights of then: it begins with the weights now, without what "
                "they round. Load the model's state dict before the optimizer's",
                tuple(self._shape),
            )
        self._joined_with = None

    @property
    def in_shards(self) -> bool:
        """Whether each of many ranks updates its own shard only (ZeRO, stage 1)."""
        return self.parameter.stored.shard.ranks.shards > 1

    @property
    def touched(self) -> list[int]:
        """The keys of the storages that the update reads and writes."""
        gradient = [self.gradient.stored.key] if isinstance(self.gradient, StoredTensor) else []
        return [self.parameter.stored.key, *gradient, *self._keys]

    @cached_property
    def _keys(self) -> list[int]:
        return [tensor.stored.key for tensor in self.tensors.values()]

    @property
    def allocations(self) -> list[Allocation]:
        """Where the parameter and its states live."""
        return [self.parameter.stored.bytes.allocation, *self._allocations]

    @cached_property
    def _allocations(self) -> list[Allocation]:
        return [tensor.stored.bytes.allocation for tensor in self.tensors.values()]

    def flush(self) -> None:
        """Wait until the parameter and its states are in the store. Raises: StoreError."""
        for tensor in (self.parameter, *self.tensors.values()):
            tensor.stored.bytes.flush()

    @property
    def streamed_gradient(self) -> StoredTensor | None:
        """The gradient, if it is a stored tensor, which is read chunk by chunk."""
        return self.gradient if isinstance(self.gradient, StoredTensor) and not self.gradient.views else None

    def joins(self, other: ParameterStates) -> bool:
        """Whether both parameters are members of one group, and their gradients come alike."""
        mine, its = self.parameter.stored.bytes, other.parameter.stored.bytes
        return mine.allocation is its.allocation and (self.streamed_gradient is None) == (
            other.streamed_gradient is None
        )

    def is_in_store(self) -> bool:
        """Flush, and return whether nothing failed."""
        try:
            self.flush()
        except StoreError:
            return False
        return True

    def load(self, entry: State, layout: StateLayout) -> State:
        """Copy the values of a fitting entry to their tier. Returns what the optimizer shows."""
        shown: State = {}
        companions = _companions(entry)
        for name, value in entry.items():
            if kind_of(name, entry) is not None and not (name in companions and name in self.tensors):
                continue
            if name in self.tensors:
                value = self.parameter.shown(self.copy(name, value, entry.get(companion_of(name))))
                if (companion := companion_of(name)) in self.tensors:
                    shown[companion] = self.parameter.shown(self.tensors[companion])
            elif name in layout.scalars:
                dtype = layout.scalars[name]
                value = value if dtype is None else _scalar(value, dtype)
            shown[name] = value
        return shown

    @property
    def has_master(self) -> bool:
        """Whether the parameter's own bytes are too coarse to be updated."""
        return self.parameter.dtype != self.dtype

    @cached_property
    def masters(self) -> tuple[str, ...]:
        """The names of what is kept of the master."""
        return tuple(name for name in _MASTERS if name in self.tensors)

    @property
    def reads_weights(self) -> bool:
        """Whether an update needs what the parameter holds, as its master or as a part of that."""
        return self.masters != (MASTER,)

    @cached_property
    def rounded(self) -> list[str]:
        """The names of the states that are kept in less than the dtype of the update, in order."""
        states = (name for name in self.tensors if kind_of(name, self.tensors) is None)
        return [name for name in states if self.tensors[name].dtype.itemsize < self.dtype.itemsize]

    @property
    def scratch_rows(self) -> int:
        """How often an element needs memory in the dtype of the update, for what is in another."""
        gradient = self.parameter if self.gradient is None else self.gradient
        return 1 + len(self.rounded) if self.rounded or gradient.dtype != self.dtype else 0

    @property
    def bytes_per_element(self) -> int:
        """The bytes of buffers that the update of an element takes, of scratch too; what lives in host memory takes
        none.

        Without a gradient yet, one of the parameter's dtype in memory is assumed.
        """
        return self.scratch_rows * self.dtype.itemsize + self.bytes_opened

    @property
    def bytes_opened(self) -> int:
        """The bytes of windows for the update of an element."""
        gradient = self.gradient
        if isinstance(gradient, StoredTensor) and not gradient.stored.bytes.in_host_memory:
            return self.bytes_written + gradient.dtype.itemsize
        return self.bytes_written

    @cached_property
    def bytes_written(self) -> int:
        """The bytes per element that an update writes to the store."""
        states = (tensor for name, tensor in self.tensors.items() if kind_of(name, self.tensors) is None)
        tensors = (self.parameter, *states)
        return sum(tensor.dtype.itemsize for tensor in tensors if not tensor.stored.bytes.in_host_memory)

    def states_nbytes(self, elements: range) -> int:
        """Return the bytes of the states of some elements of the parameter, masters among them."""
        parts = ((part_of(name, self.tensors, elements), tensor) for name, tensor in self.tensors.items())
        return sum(len(part) * tensor.dtype.itemsize for part, tensor in parts)

    def reserve(self, layout: StateLayout, dtype: torch.dtype) -> None:
        """Make room for the states of `layout` that have none, and for a master where the update, in `dtype`, needs one
        by now.

        Raises: StoreError when there is no space, OptimizerError when the parameter's dtype became another one in which
        the states don't fit, or its shape another one.
        """
        if self._reserved is not None and self._reserved == (layout, dtype, self.parameter.stored.key):
            return
        shard = self.parameter.stored.shard
        self.updated = shard.own if self.in_shards else (range(self.parameter.numel()),)
        self.count = sum(map(len, self.updated))
        if dtype != self.dtype:
            raise OptimizerError(
                f"a parameter of shape {tuple(self.parameter.shape)} was converted to {self.parameter.dtype} after its "
                f"states were made in {self.dtype}: make a new optimizer after converting the model"
            )
        if self.parameter.shape != self._shape:
            raise OptimizerError(
                f"a parameter got the shape {tuple(self.parameter.shape)} after its states were made: make a new "
                "optimizer after resizing embeddings"
            )
        of_master = layout.of_master(self.parameter.dtype, self.dtype)
        if of_master != {name: self.tensors[name].dtype for name in self.masters}:
            for name in self.masters:
                self._keep(name, None)
            for name, kept_in in of_master.items():
                self._reserve(name, kept_in)
        for name, kept_in in layout.tensors.items():
            if name not in self.tensors:
                self._reserve(name, kept_in, layout.shapes.get(name))
        if layout.non_elementwise:
            self._check_room()
        else:
            gradient = self.parameter.stored.gradient  # which plans look at
            gradient.state_dtype = layout.form
            gradient.master_dtype = layout.master_form(self.parameter.dtype, self.dtype)
            self._reserved = layout, dtype, self.parameter.stored.key

    def _check_room(self) -> None:
        """Raises: OptimizerError when the host arena can't have the parameter, its gradient and its states at once."""
        tensors = (self.parameter, self.parameter.grad, *self.tensors.values())
        streamed = [t for t in tensors if isinstance(t, StoredTensor) and not t.stored.bytes.in_host_memory]
        check_room(self.parameter, sum(tensor.nbytes for tensor in streamed))

    def take_over_shown(self, entry: State) -> frozenset[str]:
        """Take over the states that the optimizer shows, and have it show these. Returns the names of those that hold
        values."""
        if all([entry.get(name) is tensor for name, tensor in self.tensors.items()]):
            return self._names
        present = frozenset(name for name in self.tensors if entry.get(name) is not None)
        for name in present:
            entry[name] = self.parameter.shown(self.take_over(name, local_part(entry[name])))
        made = {companion_of(name) for name in present} & self.tensors.keys() - present  # of values that had none
        for name in made:
            entry[name] = self.parameter.shown(self.tensors[name])
        return present | made

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def take_over(self, name: str, value: torch.Tensor) -> StoredTensor:
        """Return the tensor of state `name`, now with `value`, which is kept itself when it is stored already."""
        mine = self.tensors[name]
        if value is mine:
            return mine
        if isinstance(value, StoredTensor) and _alike(mine, value):
            self._keep(name, value)
            return value
        return self.copy(name, value)

    def copy(self, name: str, value: torch.Tensor, companion: torch.Tensor | None = None) -> StoredTensor:
        """Return the tensor of state `name`, now with a copy of `value`'s elements, which may have a `companion`."""
        mine = self.tensors[name]
        if value is mine:
            return mine
        alike = mine.dtype == value.dtype or kind_of(name, self.tensors) is not None
        if not alike and has_companion(mine):
            encode_into(name, mine, self.tensors[companion_of(name)], value)
        elif not alike and has_companion(value):
            assert companion is not None
            decode_into(name, mine, value, companion, self.parameter)
            if name == MASTER:
                self._joined_with = self.parameter.stored.bytes.version
        else:
            copy_into(mine, value)
        return mine

    def put(self, name: str, value: torch.Tensor) -> None:
        """Write what a class made to the tensor of state `name`, which is made where there is none of its shape."""
        mine = self.tensors.get(name)
        if mine is None or mine.shape != value.shape or mine.dtype != value.dtype:
            self._reserve(name, value.dtype, value.shape)
        self.tensors[name].stored.set(value)

    def _reserve(self, name: str, dtype: torch.dtype, shape: torch.Size | None = None) -> None:
        """Make room for state `name`, of `shape` if it isn't the parameter's."""
        parameter, storage = self.parameter, self.parameter.stored
        space = self._spaces.pop(name, None)
        kind = kind_of(name, self.tensors)
        if kind is not None:
            shape = kind.shape(parameter.shape)
            mine = space if space is not None else new_scales([storage], kind.dtype, kind.elements)[0]
        elif shape is None or shape == parameter.shape:
            mine = space if space is not None and space.dtype == dtype else new_states([storage], dtype)[0]
        else:  # of many ranks, all have the same
            tier, count = storage.placement.optimizer, shape.numel()
            shard = LocalShard(Shards.of(count, 1, storage.placement.on_nvme))
            mine = TensorStorage(storage.config, shard, Allocation(storage.tiers, tier, [count], dtype, storage.device))
        self._keep(name, StoredTensor.of(mine, shape or parameter.shape, parameter.device))

    def _keep(self, name: str, tensor: StoredTensor | None) -> None:
        """Have `tensor` for a state from now on, or nothing. What was worked out from the others is forgotten."""
        if tensor is None:
            self.tensors.pop(name, None)
        else:
            self.tensors[name] = tensor
        self._reserved = None
        for known in ("masters", "rounded", "bytes_written", "_keys", "_allocations", "_names"):
            self.__dict__.pop(known, None)


def by_allocation(parameters: Iterable[StoredTensor]) -> list[list[StoredTensor]]:
    """Group parameters that live side by side, in the order in which they were made."""
    allocations: dict[Allocation, list[StoredTensor]] = {}
    for parameter in sorted(parameters, key=lambda parameter: parameter.stored.key):
        allocations.setdefault(parameter.stored.bytes.allocation, []).append(parameter)
    return list(allocations.values())


def _alike(mine: StoredTensor, value: StoredTensor) -> bool:
    """Whether `value` has the same elements in the same places."""
    if value.views or (value.shape, value.dtype) != (mine.shape, mine.dtype):
        return False
    return value.stored.shard.shards == mine.stored.shard.shards


class KeptStates:
    """Where the states of an optimizer's stored parameters live.

    Attributes:
        states: the states of each parameter for which room was made.
    """

    def __init__(self, *, masters: bool) -> None:
        """`masters` says whether parameters of low precision are updated through an fp32 copy."""
        self._masters = masters
        self.states: dict[StoredTensor, ParameterStates] = {}
        self._spaces: dict[StoredTensor, dict[str, TensorStorage]] = {}  # of parameters to come

    def dtype(self, parameter: StoredTensor) -> torch.dtype:
        """Return the dtype of a parameter's update. Raises: OptimizerError for one that can't be updated in pieces."""
        dtype = working_dtype(parameter)
        return dtype if self._masters else parameter.dtype

    def make_room(self, layouts: Mapping[StoredTensor, StateLayout]) -> None:
        """Make room for the states of parameters, each with its layout, before `reserve`. Those of the members of one
        group live side by side, too, where they have the same states, of their own shape. Raises: StoreError when there
        is none."""
        for members in by_allocation(layouts):
            alike: dict[Hashable, list[StoredTensor]] = {}
            for parameter in members:
                layout = layouts[parameter]
                if not layout.non_elementwise:
                    alike.setdefault(tuple(layout.tensors.items()), []).append(parameter)
            for together in alike.values():
                if len(together) > 1:
                    self._make_room(together, layouts[together[0]])

    def _make_room(self, together: Sequence[StoredTensor], layout: StateLayout) -> None:
        first, storages = together[0], [parameter.stored for parameter in together]
        dtype = self.dtype(first)
        names = {**layout.of_master(first.dtype, dtype), **layout.tensors}
        kinds = {name: kind_of(name, names) for name in names}
        rows = {
            name: new_states(storages, kept_in)
            if (kind := kinds[name]) is None
            else new_scales(storages, kind.dtype, kind.elements)
            for name, kept_in in names.items()
        }
        for number, parameter in enumerate(together):
            self._spaces[parameter] = {name: row[number] for name, row in rows.items()}

    def reserve(
        self, parameter: StoredTensor, layout: StateLayout, shown: Mapping[torch.Tensor, State]
    ) -> ParameterStates:
        """Make room for the states of a parameter, as `ParameterStates.reserve`. `shown` is the optimizer's `state`."""
        dtype = self.dtype(parameter)
        states = self.states.get(parameter)
        if states is None:
            states = self.states[parameter] = ParameterStates(parameter, dtype, self._spaces.pop(parameter, None))
        states.reserve(layout, dtype)
        if not states.has_master and parameter.whole in shown:
            for name in (MASTER, MASTER_UP):
                shown[parameter.whole].pop(name, None)
        return states

    @held_back
    def load(
        self,
        entries: Mapping[StoredTensor, State],
        layout_of: Callable[[StoredTensor], StateLayout],
        shown: Mapping[torch.Tensor, State],
    ) -> None:
        """Copy the values of entries that fit to where they live. `shown` is the optimizer's `state`.

        Raises: StoreError; some are copied then.
        """
        for parameter, entry in entries.items():
            layout = layout_of(parameter)
            states = self.reserve(parameter, layout, shown)
            states.version = None
            shown[parameter.whole].update(states.load(entry, layout))
        for tiers in {parameter.stored.tiers for parameter in entries}:
            tiers.drain()
