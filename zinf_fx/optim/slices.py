"""Slices of parameters, with their gradients and states: their windows are opened for one update.

A slice is a run of whole members of a parameter group, or a range of elements of one member. A lone parameter is a run
of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Group, State, snapshot, step_without_hooks
from zinf_fx.optim.elements import AnyWindow, OpenWindows
from zinf_fx.optim.formats import MASTER, part_of
from zinf_fx.optim.layouts import StateLayout, is_stored
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.update import Operands, take_over_written
from zinf_fx.runtime.memory.arena import CachedViews
from zinf_fx.runtime.memory.device import Device
from zinf_fx.runtime.tensor.storage import TensorStorage, settle
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes, side_by_side
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window

Elements = list[torch.Tensor]
"""Those of each member of a slice, 1-D: the same list when they lie where they lay before."""


class UpdateKind(NamedTuple):
    """What parameters have in common that may share a chunk.

    Attributes:
        place: the device that updates them.
        dtype: the dtype in which they are updated.
        names: the states that are stored.
        present: those of them, and of the master, that hold values; the torch class makes the others.
        non_elementwise: whether each is updated whole, in a chunk of its own, because the class isn't element-wise.
    """

    place: Device
    dtype: torch.dtype
    names: tuple[str, ...]
    present: frozenset[str]
    non_elementwise: bool

    @property
    def is_first(self) -> bool:
        """Whether the torch class makes states, in memory of its own."""
        return not self.present.issuperset(self.names) or (self.non_elementwise and not self.names)


class UpdateGroup:
    """Parameters of one kind in one of the optimizer's groups: one call of the torch class may update them.

    Attributes:
        options: the options of the optimizer's group when the latest step took them.
    """

    def __init__(self, options: Group, kind: UpdateKind) -> None:
        self.options, self.kind = options, kind


class UpdateGroups:
    """The update groups of one optimizer, from step to step."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, UpdateKind], UpdateGroup] = {}

    def begin_step(self, groups: Sequence[Group]) -> None:
        """Take over the options that the optimizer's groups have now. No earlier step is under way."""
        self._known = {key: group for key, group in self._known.items() if key[0] < len(groups)}
        for (number, _), group in self._known.items():
            group.options = snapshot(groups[number])

    def of(
        self, number: int, group: Group, states: ParameterStates, layout: StateLayout, present: frozenset[str]
    ) -> UpdateGroup:
        """Return the update group of a parameter in the optimizer's group of this number. `present` are the states that
        hold values."""
        names = tuple(layout.tensors)
        if layout.non_elementwise:  # others may be present, and the class makes what it needs
            names = tuple(name for name in states.tensors if name in present and name not in states.masters)
        kind = UpdateKind(states.place, states.dtype, names, present, layout.non_elementwise)
        if (number, kind) not in self._known:
            self._known[number, kind] = UpdateGroup(snapshot(group), kind)
        return self._known[number, kind]


class Update(NamedTuple):
    """How a parameter is updated, and what of it.

    Attributes:
        entry: what the optimizer shows of its states.
    """

    group: UpdateGroup
    states: ParameterStates
    entry: State


class SliceStates:
    """The arrays of a slice. What an update needs to know of them is worked out once, and serves for as long as the
    same tensors are updated.

    Attributes:
        updates: the update of each member.
        elements: which elements of each member these are.
        is_last: whether this rank updates no element of the members behind these.
    """

    def __init__(self, updates: Sequence[Update], elements: Sequence[range], is_last: bool) -> None:
        self.updates, self.elements, self.is_last = updates, elements, is_last
        self.members = [update.states for update in updates]
        self.kind = updates[0].group.kind

    @cached_property
    def parameters(self) -> dict[StoredTensor, ParameterStates]:
        """The members' parameters, in order, with their states."""
        return {states.parameter: states for states in self.members}

    @property
    def has_masters(self) -> bool:
        return self.members[0].has_master

    @cached_property
    def parameter_row(self) -> Row:
        return self._row(list(self.parameters), self.elements)

    @cached_property
    def gradient_row(self) -> Row | None:
        """The gradients, if they are stored."""
        gradients = [states.streamed_gradient for states in self.members]
        stored = [gradient for gradient in gradients if gradient is not None]
        return self._row(stored, self.elements) if len(stored) == len(gradients) else None

    @cached_property
    def state_rows(self) -> dict[str, Row]:
        """The rows of states and masters, by name."""
        names = self.members[0].tensors
        rows: dict[str, Row] = {}
        for name in (*self.members[0].masters, *self.kind.names):
            tensors = [states.tensors[name] for states in self.members]
            parts = [part_of(name, names, elements) for elements in self.elements]
            rows[name] = self._row(tensors, [range(tensors[0].numel())] if self.kind.non_elementwise else parts)
        return rows

    def _row(self, tensors: Sequence[StoredTensor], elements: Sequence[range]) -> Row:
        gathers = self.kind.non_elementwise and tensors[0].stored.shard.in_shards
        return GatheredRow(tensors[0]) if gathers else StoredRow(tensors, elements)

    @cached_property
    def touched(self) -> frozenset[int]:
        """The keys of the storages that the update reads and writes."""
        return frozenset(key for states in self.members for key in states.touched)

    @property
    def nbytes(self) -> int:
        """The bytes of the states, masters among them."""
        return sum(states.states_nbytes(part) for states, part in zip(self.members, self.elements, strict=True))

    def let_go_of_gradients(self) -> bool:
        """Drop the gradients, which are consumed: their memory goes back with the last that holds it. Returns whether
        anything was held."""
        row = self.__dict__.get("gradient_row")
        if row is not None and row.holds_no_memory:
            return False
        self.__dict__.pop("gradient_row", None)
        return True

    def open(self) -> OpenSlice:
        """Open the windows of weights and states. Raises: StoreError; no window is open then."""
        return OpenNonElementwise(self) if self.kind.non_elementwise else OpenSlice(self)


class _Run(NamedTuple):
    """Members of a slice that live side by side in one array.

    Attributes:
        bytes: the bytes of the members, with what lies between them.
        elements: which elements of the bytes a window shows.
        views: makes the elements of each member of the memory of that window.
    """

    bytes: StoredBytes
    elements: range
    views: CachedViews

    @staticmethod
    def of(storages: Sequence[TensorStorage], elements: Sequence[range]) -> _Run:
        held = side_by_side([storage.bytes for storage in storages])
        firsts = [
            storage.bytes.elements.start - held.elements.start + storage.shard.position(part.start)
            for storage, part in zip(storages, elements, strict=True)
        ]
        start, count = (0, held.count) if len(storages) > 1 else (firsts[0], len(elements[0]))
        parts = [slice(at - start, at - start + len(part)) for at, part in zip(firsts, elements, strict=True)]
        return _Run(held, range(start, start + count), CachedViews(parts))


class StoredRow:
    """The elements of a slice in one array.

    The members of a group live side by side in each of its arrays, and one window has all of them. A state or a
    gradient that is replaced lives elsewhere, and has a window of its own. The row doesn't hold the tensors: space of
    gradients is free without them.
    """

    def __init__(self, tensors: Sequence[StoredTensor], elements: Sequence[range]) -> None:
        storages = [tensor.stored for tensor in tensors]
        self._tiers, self._in_buffer = storages[0].tiers, all(storage.buffer_place is not None for storage in storages)
        self._keys = frozenset(storage.key for storage in storages)
        self._local_shards = [storage.shard for storage in storages]
        firsts = [n for n, storage in enumerate(storages) if not n or not storage.bytes.follows(storages[n - 1].bytes)]
        runs = [slice(*ends) for ends in pairwise([*firsts, len(storages)])]
        self._runs = [_Run.of(storages[run], elements[run]) for run in runs]

    @property
    def holds_no_memory(self) -> bool:
        """Whether it is all the same to the memories how long this is there: buffers of gradients are used again."""
        allocations = [run.bytes.allocation for run in self._runs]
        return self._in_buffer and all([where.tier == "nvme" or where.is_reused for where in allocations])

    def open(self, place: Device, load: bool) -> Iterator[Window | DeviceWindow]:
        """Open windows with all of them, where `place` computes, once nothing else is about to change them."""
        settle(self._tiers, self._keys, self._local_shards)
        for held, elements, _ in self._runs:
            window = held.window if place.in_host_memory else held.device_window
            yield window(elements.start, len(elements), load=load)

    def of(self, windows: Sequence[AnyWindow]) -> Elements:
        """Return the elements of each member, 1-D, once they are there."""
        runs = zip(self._runs, windows, strict=True)
        elements = [run.views.of(window.wait(), run.bytes.allocation.tiers.host) for run, window in runs]
        return elements[0] if len(elements) == 1 else list(chain.from_iterable(elements))


class GatheredRow:
    """All elements of a parameter that ranks have shards of, for an update that isn't element-wise."""

    holds_no_memory = False

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor

    def open(self, place: Device, load: bool) -> Iterator[GatheredWindow]:
        """Open what gathers them when it is waited for."""
        yield GatheredWindow(self._tensor, place)

    def of(self, windows: Sequence[AnyWindow]) -> Elements:
        """Return all of them, 1-D."""
        return [window.wait() for window in windows]


Row = StoredRow | GatheredRow


class GatheredWindow:
    """The part of a `Window` that an update uses, over the full value of a tensor of which this rank has a shard.

    Waiting is collective.
    """

    ready = is_current = True

    def __init__(self, tensor: StoredTensor, place: Device) -> None:
        self._tensor, self._place = tensor, place
        self._value: torch.Tensor | None = None

    def arrived(self) -> None:
        """Return at once: nothing is under way yet."""

    def wait(self) -> torch.Tensor:
        """Return all elements, 1-D."""
        if self._value is None:
            self._value = self._tensor.stored.value().to(self._place.torch_device)
        return self._value

    def store(self) -> None:
        """Write this rank's shard."""
        self._tensor.stored.set(self.wait())

    def close(self) -> None:
        """Drop the value."""
        self._value = None


class OpenSlice(OpenWindows):
    """The windows of a slice, opened at construction, but for the gradient's: wait for their reads, update what the
    `operands` are, `store`; `close` in any case.

    Attributes:
        arrays: the elements of each member, once waited for: of parameters, gradients, and states by name.
    """

    def __init__(self, states: SliceStates) -> None:
        """Raises: StoreError; no window is open then."""
        super().__init__()
        self.states, kind, first = states, states.kind, states.members[0]
        self._place = kind.place
        try:
            self._known = kind.present.issuperset(first.masters)
            self._masters = {name: self._open(states.state_rows[name], self._known) for name in first.masters}
            self._refresh = self._refreshes
            self._parameter = self._open(states.parameter_row, first.reads_weights or self._refresh)
            self._states = {name: self._open(states.state_rows[name], name in kind.present) for name in kind.names}
        except BaseException:
            self.close()
            raise

    def _open(self, row: Row, load: bool) -> list[AnyWindow]:
        return [self._keep(window) for window in row.open(self._place, load)]

    def open_gradient(self) -> None:
        """Open the gradients, which are final. Raises: StoreError."""
        row = self.states.gradient_row
        self._gradient = None if row is None else self._open(row, True)

    @property
    def _refreshes(self) -> bool:
        """Whether a master takes over what the parameter holds."""
        return bool(self._masters) and any(states.refresh for states in self.states.members)

    @property
    def is_current(self) -> bool:
        """Whether the windows would not be opened otherwise now."""
        return self.shows_the_present and (self._refresh or not self._refreshes)

    def wait(self) -> None:
        """Wait for the reads, then take over what others wrote to the parameters; where these still are the masters
        rounded, the masters stay."""
        for window in self._windows:
            window.wait()
        self._of_parameters = self.states.parameter_row.of(self._parameter)
        self._of_masters = self._of(self._masters)
        self._of_states = self._of(self._states)
        self._of_gradients = self._gradients()
        for number, parameter in enumerate(self._of_parameters if self._refresh else ()):
            master = {name: elements[number] for name, elements in self._of_masters.items()}
            take_over_written(master, parameter, self._known)

    def _of(self, opened: Mapping[str, Sequence[AnyWindow]]) -> dict[str, Elements]:
        return {name: self.states.state_rows[name].of(windows) for name, windows in opened.items()}

    def _gradients(self) -> Elements:
        if self._gradient is not None:
            row = self.states.gradient_row
            assert row is not None
            return row.of(self._gradient)
        flat_gradients: Elements = []
        for states, part in zip(self.states.members, self.states.elements, strict=True):
            gradient = states.gradient
            assert gradient is not None
            if isinstance(gradient, StoredTensor):
                gradient = gradient.full_tensor()
            flat = gradient.detach().reshape(-1)[part.start : part.stop]
            flat_gradients.append(flat.to(self._place.torch_device))
        return flat_gradients

    @property
    def arrays(self) -> list[Elements]:
        """All that is updated, array by array."""
        return [self._of_parameters, *self._of_masters.values(), self._of_gradients, *self._of_states.values()]

    def operands(self, number: int, elements: range, numbers: State) -> Operands:
        """Return what an update of some elements of a member reads and writes. `elements` are counted from the slice's
        first; `numbers` are the states that aren't stored."""
        parameter, gradient = self._of_parameters[number], self._of_gradients[number]
        master = {name: array[number] for name, array in self._of_masters.items()}
        states = {name: array[number] for name, array in self._of_states.items()}
        if len(elements) < len(self.states.elements[number]):
            parameter, gradient = (array[elements.start : elements.stop] for array in (parameter, gradient))
            names = self.states.members[number].tensors
            for arrays in (master, states):
                parts = {name: part_of(name, names, elements) for name in arrays}
                arrays.update((name, arrays[name][part.start : part.stop]) for name, part in parts.items())
        return Operands(parameter, gradient, master, states, self.states.kind.present, numbers)

    @property
    def names(self) -> Sequence[str]:
        """The names of the states that are stored, once updated."""
        return self.states.kind.names

    def store(self, unscaled: bool) -> None:
        """Start writing what was updated; with `unscaled`, the gradients are part of that."""
        gradients = self._gradient or ()
        for window in self._windows:
            if unscaled or not any([window is gradient for gradient in gradients]):
                window.store()


class OpenNonElementwise(OpenSlice):
    """A whole parameter, everything in its own shape, for one update of a class that isn't element-wise."""

    def __init__(self, states: SliceStates) -> None:
        super().__init__(states)
        self._names = states.kind.names
        self._made: dict[str, torch.Tensor] = {}

    @property
    def names(self) -> Sequence[str]:
        return self._names

    def update(self, inner: Optimizer, numbers: State) -> State:
        """Run `inner`, the torch class with options and no parameters yet. `numbers` are the states that stay in memory
        now; returns those that stay there afterwards."""
        (states,) = self.states.members
        shape = states.parameter.shape
        # What the class updates. A split master is refused: see `check_non_elementwise`.
        stored = self._of_masters[MASTER][0] if self._masters else self._of_parameters[0]
        memory = {name: array[0].view(states.tensors[name].shape) for name, array in self._of_states.items()}
        weights = stored.view(shape)
        weights.grad = self._of_gradients[0].view(shape).to(weights.dtype)
        inner.param_groups[0]["params"] = [weights]
        inner.state.clear()
        inner.state[weights] = numbers | memory
        step_without_hooks(inner)
        weights.grad = None
        if weights.data_ptr() != stored.data_ptr():  # `.data` was assigned
            stored.copy_(weights.reshape(-1))
        if self._masters:
            self._of_parameters[0].copy_(stored)
        return dict(self._left(inner.state[weights], memory))

    def _left(self, state: State, memory: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, object]]:
        """Put updated states where they will be stored from. Yields the others."""
        shape = self.states.members[0].parameter.shape
        for name, value in state.items():
            mine = memory.get(name)
            if mine is not None and value.shape == mine.shape and value.dtype == mine.dtype:
                if value is not mine:
                    mine.copy_(value)
            elif isinstance(value, torch.Tensor) and is_stored(value, shape):
                self._made[name] = value
            else:
                yield name, value
        self._names = (*(name for name in memory if name in state and name not in self._made), *self._made)

    def store(self, unscaled: bool) -> None:
        super().store(unscaled)
        for name, value in self._made.items():
            self.states.members[0].put(name, value)

    def close(self) -> None:
        self._made = {}
        super().close()
