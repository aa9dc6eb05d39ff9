"""Slices of parameters with their gradients and states: their windows are opened for one update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Group, Lists, State, same_objects, snapshot, step_together, values_of
from zinf_fx.optim.elements import AnyWindow, OpenWindows, moved, open_elements, open_window
from zinf_fx.optim.formats import MASTER, MASTER_UP, computed, join, kind_of, part_of, split, store_computed
from zinf_fx.optim.layouts import (
    StateLayout,
    _is_stored,
)
from zinf_fx.optim.states import ParameterStates, by_allocation
from zinf_fx.plan.chunks import AT_A_TIME, Piece, charged
from zinf_fx.plan.packs import starts_of
from zinf_fx.runtime.memory.arena import CachedViews
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.stored_bytes import side_by_side
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up


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


@dataclass(eq=False)
class Recipe:
    """What parameters have in common that may share a chunk: a group, the states present, place and dtype.

    Attributes:
        group: its options when the latest step took them.
        place: what updates them.
        names: the states that are streamed.
        present: those of them, and of the master, that hold values; the torch class makes the others.
        whole: each is updated whole, in a chunk of its own.
    """

    group: Group
    place: Device
    dtype: torch.dtype
    names: tuple[str, ...]
    present: frozenset[str]
    whole: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the torch class makes states, in memory of its own."""
        return not self.present.issuperset(self.names) or (self.whole and not self.names)

    def is_like(self, other: Recipe) -> bool:
        """Whether the two differ in nothing but the options of their groups."""
        ours, theirs = ((one.place, one.dtype, one.names, one.present, one.whole) for one in (self, other))
        return ours == theirs


Update = tuple[Recipe, ParameterStates]
"""How a parameter is updated, and what of it."""


class Recipes:
    """Those of one optimizer, from step to step."""

    def __init__(self) -> None:
        self._known: dict[tuple, Recipe] = {}  # by the number of the group, and more

    def begin_step(self, groups: Sequence[Group]) -> None:
        """Take over the options that the optimizer's groups have now. No earlier step is under way."""
        self._known = {key: recipe for key, recipe in self._known.items() if key[0] < len(groups)}
        for (number, *_), recipe in self._known.items():
            recipe.group = snapshot(groups[number])

    def of(self, number: int, group: Group, states: ParameterStates, layout: StateLayout, present: frozenset) -> Recipe:
        """That of a parameter in the group of this number. `present`: the states that hold values."""
        key = (number, states.place, states.dtype, tuple(layout.tensors), present, layout.whole)
        if key not in self._known:
            names = tuple(layout.tensors)
            if layout.whole:  # others may be present, and the class makes what it needs
                names = tuple(name for name in states.tensors if name in present and name not in states.masters)
            self._known[key] = Recipe(snapshot(group), states.place, states.dtype, names, present, layout.whole)
        return self._known[key]


@dataclass
class Begun:
    """Elements of a part whose update has begun.

    Attributes:
        elements: which they are, of the part.
        weights, state: what the arithmetic runs on.
        memory: the states that are stored, by name.
        masters: likewise, those of the weights.
    """

    elements: slice
    weights: torch.Tensor
    state: State
    memory: Mapping[str, torch.Tensor]
    masters: Mapping[str, torch.Tensor] = field(default_factory=dict)


class OpenPart(OpenWindows):
    """The windows of one part, opened at construction, but for the gradient's: wait for their reads, update all of it,
    some elements at a time or several at the same time, `store`; `close` in any case.

    Attributes:
        piece: which elements of which parameter.
        names: of the states that are stored.
    """

    def __init__(self, piece: Piece[ParameterStates], names: Iterable[str], present: Set[str]) -> None:
        """`names`: the states that are stored; those in `present` hold values, as does the master if it is in there.

        Raises: StoreError; no window is open then.
        """
        states = piece.owner
        self.piece, self.names, self._place, self._present = piece, tuple(names), states.place, present
        super().__init__()
        try:
            self._known = present.issuperset(states.masters)
            self._master = {n: self._open(states.tensors[n], self._known, n) for n in states.masters}
            self._refresh = states.refresh
            self._parameter = self._open(states.parameter, states.reads_weights or self._refresh)
            self._states = {name: self._open(states.tensors[name], name in present, name) for name in self.names}
        except BaseException:
            self.close()
            raise

    @property
    def parameters(self) -> list[StoredTensor]:
        """Those that are updated."""
        return [self.piece.owner.parameter]

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that the update changes, masters among them."""
        return self.piece.owner.states_nbytes(self._elements)

    def open_gradient(self) -> None:
        """Open the gradient, which is final."""
        self._gradient = self._keep(self._open_gradient(self.piece.owner.gradient))

    @property
    def is_current(self) -> bool:
        """Whether its windows would not be opened otherwise now."""
        return self.shows_the_present and (self._refresh or not self.piece.owner.refresh)

    def wait(self) -> None:
        """After the reads, take over what others wrote to the parameter; where it still is the master rounded, the
        master stays."""
        for window in self._windows:
            window.wait()
        if self._master and self._refresh:
            take_over_written(self._elements_of(self._master), self._parameter.wait(), self._known)

    def _elements_of(
        self, windows: Mapping[str, Window | DeviceWindow], some: range | None = None
    ) -> dict[str, torch.Tensor]:
        """What windows over states have, by name: of some of the elements that they are over; default all."""
        found = {name: window.wait() for name, window in windows.items()}
        if some is None:
            return found
        parts = {name: part_of(name, self.piece.owner.tensors, some) for name in found}
        return {name: found[name][part.start : part.stop] for name, part in parts.items()}

    def store(self, unscaled: bool) -> None:
        """Start writing what was updated; with `unscaled`, the gradient is part of that."""
        for window in (*self._master.values(), self._parameter, *self._states.values()):
            window.store()
        if unscaled:
            self._gradient.store()

    @property
    def _elements(self) -> range:
        """Of the parameter."""
        return range(self.piece.start, self.piece.start + self.piece.count)

    def _open(self, tensor: StoredTensor, load: bool, state: str = "") -> Window | DeviceWindow:
        part = part_of(state, self.piece.owner.tensors, self._elements)
        return self._keep(open_window(tensor.storage, self._place, part.start, len(part), load=load))

    def _open_gradient(self, gradient: torch.Tensor) -> AnyWindow:
        return open_elements(gradient, self._place, self.piece.start, self.piece.count)


class OpenPiece(OpenPart):
    """A piece of a parameter that is updated element by element: everything is flat."""

    def begin(self, elements: slice, scalars: State, scratch: torch.Tensor | None) -> Begun:
        """Some of the elements, as weights with their gradient, and with their states, copies of `scalars` among them.

        `scratch`: in the weights' dtype, `scratch_rows` of at least as many elements: for the gradient and for states
        in another dtype.
        """
        stored, some = self.piece.owner, range(elements.start, elements.stop)
        masters, memory = self._elements_of(self._master, some), self._elements_of(self._states, some)
        room = None if stored.weights_row is None else scratch[stored.weights_row, : len(some)]
        weights = weights_of(self._parameter.wait()[elements], masters, room)
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in scalars.items()}
        gradient = self._gradient.wait()[elements]
        state |= begin_update(weights, gradient, memory, self._present, stored.rounded, scratch)
        return Begun(elements, weights, state, memory, masters)

    def end(self, begun: Begun, state: State) -> State:
        """Put the updated weights and element-wise states where they will be stored from. Returns the other states."""
        store_weights(begun.weights, self._parameter.wait()[begun.elements], begun.masters)
        return end_update(begun.weights, begun.memory, state)


class PackedStates:
    """The states of parameters that live side by side, in the place of those of one.

    What their update needs to know is worked out once, and serves for as long as the same tensors are updated.
    """

    def __init__(self, updates: Sequence[Update]) -> None:
        self.updates = updates
        self.members = [states for _, states in updates]
        self.parameters = [states.parameter for states in self.members]
        self.parameter = self.parameters[0]
        self.elements = [part for states in self.members for part in states.updated]  # one of each: see `_joins`
        self.count = sum(charged(states.count) for states in self.members)
        self.updated = (range(self.count),)
        self.scratch_rows = max(states.scratch_rows for states in self.members)
        # Over which elements the last update was, and by which calls.
        self._last: tuple[list[Elements], list[_Call]] | None = None

    @cached_property
    def parameter_row(self) -> _Row:
        """The parameters."""
        return _Row(self.parameters, self.elements)

    @cached_property
    def gradient_row(self) -> _Row | None:
        """The gradients, if they are stored."""
        gradients = [states.gradient for states in self.members]
        return _Row(gradients, self.elements) if isinstance(gradients[0], StoredTensor) else None

    @cached_property
    def state_rows(self) -> dict[str, _Row]:
        """By name, the states and the masters."""
        names = self.members[0].tensors
        parts = {name: [part_of(name, names, elements) for elements in self.elements] for name in names}
        return {name: _Row([one.tensors[name] for one in self.members], some) for name, some in parts.items()}

    @cached_property
    def touched(self) -> frozenset[int]:
        """Keys of the storages that the update reads and writes."""
        return frozenset(key for states in self.members for key in states.touched)

    def calls(
        self,
        parameters: Elements,
        masters: Mapping[str, Elements],
        gradients: Elements,
        states: Mapping[str, Elements],
        shown: Mapping[torch.Tensor, State],
        scratch: torch.Tensor | None,
    ) -> Iterator[_Call]:
        """The calls of the torch class that update the parameters, over these elements of each, to run one after the
        other. `shown`, `scratch`: as of `OpenPack.update`."""
        over = [parameters, *masters.values(), gradients, *states.values()]
        if self._last is not None and same_objects(self._last[0], over):
            calls = self._last[1]
            yield from calls
        else:
            calls = []
            for numbers in self._together(AT_A_TIME if self.updates[0][0].place is CPU else None):
                updates = [self.updates[number] for number in numbers]
                calls.append(_Call(updates, numbers, parameters, masters, gradients, states, shown, scratch))
                yield calls[-1]
        lasts = not self.scratch_rows and all(call.lasts and call.recipe.place is CPU for call in calls)
        self._last = (over, calls) if lasts else None

    def let_go_of_gradients(self) -> None:
        """They are consumed: hold nothing that their memory is to go with."""
        row = self.__dict__.get("gradient_row")
        if row is None or not row.holds_no_memory:
            self.__dict__.pop("gradient_row", None)
            self._last = None

    def _together(self, elements: int | None) -> Iterator[list[int]]:
        """The numbers of parameters that one call of the class updates: of one group, and at most so many elements."""
        by_recipe: dict[Recipe, list[int]] = {}
        for number, (recipe, _) in enumerate(self.updates):
            by_recipe.setdefault(recipe, []).append(number)
        for several in by_recipe.values():
            numbers: list[int] = []
            room = elements
            for number in several:
                count = charged(len(self.elements[number]))
                if numbers and room is not None and count > room:
                    yield numbers
                    numbers, room = [], elements
                numbers.append(number)
                room = None if room is None else room - count
            yield numbers


def packed(updates: Iterable[Update], elements: int) -> list[list[Update]]:
    """Updates in groups that can be updated together: of at most so many elements, each parameter charged as
    `chunks.cut` does. Groups and what is in them come in the order in which the tensors were made."""
    known = {update[1].parameter: update for update in updates}
    allocations = [[known[parameter] for parameter in several] for several in by_allocation(known)]
    groups = [group for several in allocations for group in _groups(several, elements)]
    return sorted(groups, key=lambda group: group[0][1].parameter.storage.key)


def _groups(updates: Sequence[Update], elements: int) -> Iterator[list[Update]]:
    """Updates of one allocation: see `packed`."""
    together: list[Update] = []
    room = elements
    for update in updates:
        count = charged(update[1].count)
        if together and (count > room or not _joins(together[-1], update)):
            yield together
            together, room = [], elements
        together.append(update)
        room -= count
    yield together


def _joins(one: Update, other: Update) -> bool:
    """Whether the second parameter's tensors live behind the first one's, and the same is done with both: at once.
    Tensors that live so are of one segment."""
    recipe, next_recipe = one[0], other[0]
    if recipe.whole or not (recipe is next_recipe or recipe.is_like(next_recipe)):
        return False
    at_once = all(states.count <= AT_A_TIME for _, states in (one, other))
    return at_once and other[1].follow(one[1])


class _Row:
    """One tensor of each parameter, side by side."""

    def __init__(self, tensors: Sequence[StoredTensor], updated: Sequence[range]) -> None:
        """`updated`: which elements of each."""
        self._held = held = side_by_side([tensor.storage.bytes for tensor in tensors])
        shares = [tensor.storage.share for tensor in tensors]
        starts = starts_of((share.held for share in shares), held.dtype)
        parts: list[slice] = []
        for share, start, elements in zip(shares, starts, updated, strict=False):
            first = start + share.position(elements.start)
            parts.append(slice(first, first + len(elements)))
        self._cut = CachedViews(parts)

    @property
    def holds_no_memory(self) -> bool:
        """Whether it is all the same to the memories how long this is there."""
        return self._held.tier == "nvme" or self._held.allocation.is_lent

    def open(self, place: Device, load: bool) -> Window | DeviceWindow:
        """A window with all of them."""
        return (self._held.window if place.in_host_memory else self._held.device_window)(load=load)

    def of(self, window: Window | DeviceWindow) -> Elements:
        """The elements of each that are updated, 1-D, once they are there."""
        return self._cut.of(window.wait(), self._held.tiers.host)


Elements = list[torch.Tensor]
"""Those of each parameter of a pack, 1-D: the same list when they lie where they lay before."""


class _Call:
    """A call of the torch class: some parameters of one group, with their gradients and states.

    Attributes:
        numbers: of the parameters in their pack.
        lasts: whether the class worked on what is stored, and left it there, so that the next call may be the same.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        numbers: Sequence[int],
        parameters: Elements,
        masters: Mapping[str, Elements],
        gradients: Elements,
        states: Mapping[str, Elements],
        shown: Mapping[torch.Tensor, State],
        scratch: torch.Tensor | None,
    ) -> None:
        """`updates`: those of the parameters."""
        self.numbers, self.recipe = numbers, updates[0][0]
        self.lasts = False
        self._parameters = [states.parameter.whole for _, states in updates]
        self._stored = [parameters[number] for number in numbers]
        self._masters = [{name: elements[number] for name, elements in masters.items()} for number in numbers]
        self._weights: list[torch.Tensor] = []
        self._memory = [{name: elements[number] for name, elements in states.items()} for number in numbers]
        self._gradients: list[torch.Tensor] = []
        self._lists = Lists()
        self._state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        self._counts_are_shown = True
        counts_at = self.recipe.place if self.recipe.group.get("fused") else CPU
        rows, offset = None if scratch is None else scratch.flatten(1).view(self.recipe.dtype), 0
        several = zip(updates, numbers, self._stored, self._masters, self._memory, strict=True)
        for (_, one), number, stored, master, memory in several:
            entry = shown[one.parameter.whole]
            scalars = {k: moved(v, counts_at) for k, v in entry.items() if k not in one.tensors}
            self._counts_are_shown &= all(value is entry[name] for name, value in scalars.items())
            room = None if rows is None else rows[:, offset:]
            row = one.weights_row
            weight = weights_of(stored, master, None if row is None else room[row, : stored.numel()])
            self._weights.append(weight)
            state = begin_update(weight, gradients[number], memory, self.recipe.present, one.rounded, room)
            self._gradients.append(weight.grad)
            self._state[weight] = scalars | state
            offset += round_up(weight.numel(), WINDOW_ALIGNMENT)

    def run(self, inner: Optimizer, shown: Mapping[torch.Tensor, State]) -> None:
        """Run the class, borrowed as `inner`."""
        entries = zip((self._state[weight] for weight in self._weights), self._memory, strict=True)
        in_place = all(state.get(name) is elements for state, memory in entries for name, elements in memory.items())
        before = values_of(self._state.values())
        stays = step_together(inner, self._weights, self._gradients, self._state, before, self._lists)
        self.lasts = stays and in_place and self._counts_are_shown
        if not self.lasts:
            for parameter, weight, memory in zip(self._parameters, self._weights, self._memory, strict=True):
                shown[parameter].update(end_update(weight, memory, self._state[weight]))
        if any(MASTER_UP in master for master in self._masters):
            for each in zip(self._weights, self._stored, self._masters, strict=True):
                store_weights(*each)
        elif any(self._masters):
            torch._foreach_copy_(self._stored, self._weights)


class OpenPack(OpenWindows):
    """The windows of packed states, opened at construction: as `OpenPart`."""

    def __init__(self, states: PackedStates) -> None:
        """Raises: StoreError; no window is open then."""
        self.states = states
        recipe, _ = states.updates[0]
        self._place, present = recipe.place, recipe.present
        super().__init__()
        try:
            first = states.members[0]
            self._known = present.issuperset(first.masters)
            self._masters = {name: self._open(states.state_rows[name], self._known) for name in first.masters}
            self._refresh = bool(self._masters) and any(one.refresh for one in states.members)
            self._parameter = self._open(states.parameter_row, first.reads_weights or self._refresh)
            self._states = {name: self._open(states.state_rows[name], name in present) for name in recipe.names}
        except BaseException:
            self.close()
            raise

    def open_gradient(self) -> None:
        """As of `OpenPart`."""
        row = self.states.gradient_row
        self._gradient = None if row is None else self._open(row, True)

    @property
    def is_current(self) -> bool:
        """As of `OpenPart`."""
        refreshes = bool(self._masters) and any(one.refresh for one in self.states.members)
        return self.shows_the_present and (self._refresh or not refreshes)

    @property
    def parameters(self) -> list[StoredTensor]:
        """Those that are updated."""
        return self.states.parameters

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that the update changes."""
        several = zip(self.states.members, self.states.elements, strict=True)
        return sum(states.states_nbytes(part) for states, part in several)

    def wait(self) -> None:
        """After the reads, take over what others wrote to the parameters: see `OpenPart.wait`."""
        for window in self._windows:
            window.wait()
        if self._refresh:
            masters = self._of_states(self._masters)
            for number, parameter in enumerate(self._parameters()):
                of_one = {name: elements[number] for name, elements in masters.items()}
                take_over_written(of_one, parameter, self._known)

    def update(
        self,
        borrowed: Callable[[Group, Device], Optimizer],
        shown: Mapping[torch.Tensor, State],
        scratch: torch.Tensor | None,
    ) -> None:
        """Run the torch class, once for each group of options and some elements. `borrowed`: the class under a group's
        options; `shown`: the optimizer's state, which gets what isn't stored; `scratch`: as `OpenPiece.begin`."""
        masters, states = self._of_states(self._masters), self._of_states(self._states)
        for call in self.states.calls(self._parameters(), masters, self._gradients(), states, shown, scratch):
            call.run(borrowed(call.recipe.group, self._place), shown)

    def _of_states(self, windows: Mapping[str, Window | DeviceWindow]) -> dict[str, Elements]:
        """What windows over states have of each parameter, by name."""
        return {name: self.states.state_rows[name].of(window) for name, window in windows.items()}

    def _parameters(self) -> Elements:
        return self.states.parameter_row.of(self._parameter)

    def _gradients(self) -> Elements:
        if self._gradient is not None:
            return self.states.gradient_row.of(self._gradient)
        place = self._place.torch_device
        flat = [one.gradient.detach().reshape(-1).to(place) for one in self.states.members]
        return [one[part.start : part.stop] for one, part in zip(flat, self.states.elements, strict=True)]

    def store(self, unscaled: bool) -> None:
        """Start writing what was updated; with `unscaled`, the gradients are part of that."""
        for window in self._windows:
            if window is not self._gradient or unscaled:
                window.store()

    def _open(self, row: _Row, load: bool) -> Window | DeviceWindow:
        return self._keep(row.open(self._place, load))


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


class OpenChunk:
    """The windows of a chunk: those of weights and states are opened at construction.

    Attributes:
        number: how many chunks of the step were opened before.
    """

    def __init__(
        self, recipe: Recipe, pieces: tuple[Piece[ParameterStates | PackedStates], ...], number: int = 0
    ) -> None:
        self.recipe, self.number = recipe, number
        self._with_gradient = 0  # of the parts, from the first on
        self.parts: list[OpenPart | OpenPack] = []
        self._close = ExitStack()
        try:
            for piece in pieces:
                if isinstance(piece.owner, PackedStates):
                    part = OpenPack(piece.owner)
                else:
                    part = (OpenWhole if recipe.whole else OpenPiece)(piece, recipe.names, recipe.present)
                self.parts.append(part)
                self._close.callback(part.close)
        except BaseException:
            self.close()
            raise

    @property
    def lacks_gradients(self) -> bool:
        """Whether any part has no gradient open yet."""
        return self._with_gradient < len(self.parts)

    def open_gradients(self) -> None:
        """Open the gradients, which are final, of the parts that have none open yet. Raises: StoreError."""
        while self.lacks_gradients:
            self.parts[self._with_gradient].open_gradient()
            self._with_gradient += 1

    @property
    def is_current(self) -> bool:
        """Whether its windows would not be opened otherwise now."""
        return all(part.is_current for part in self.parts)

    @property
    def ready(self) -> bool:
        """Whether all of its reads are done."""
        return all(part.ready for part in self.parts)

    def arrive(self) -> None:
        """Wait for its reads, and change nothing."""
        for part in self.parts:
            part.arrive()

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that its update changes, masters among them."""
        return sum(part.states_nbytes for part in self.parts)

    def close(self) -> None:
        """Close the windows that were not stored."""
        self._close.close()
