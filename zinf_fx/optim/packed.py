"""Parameters whose tensors live side by side: their update reads and writes all of them at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Group, Lists, State, same_objects, step_together, values_of
from zinf_fx.optim.chunks import charged
from zinf_fx.optim.companions import MASTER_UP, part_of
from zinf_fx.optim.elements import moved
from zinf_fx.optim.opened import OpenWindows, begin_update, end_update, store_weights, take_over_written, weights_of
from zinf_fx.optim.recipe import Recipe, Update
from zinf_fx.optim.states import by_allocation
from zinf_fx.plan.memory.accounting import AT_A_TIME
from zinf_fx.plan.packs import starts_of
from zinf_fx.runtime.memory.cut import Cut
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.stored_bytes import side_by_side
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up


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
        self._cut = Cut(parts)

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
