"""Parameters whose tensors live side by side: their update reads and writes all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Group, step_without_hooks
from zinf_fx.optim.chunks import charged
from zinf_fx.optim.elements import moved
from zinf_fx.optim.opened import OpenWindows, begin_update, end_update, take_over_written
from zinf_fx.optim.recipe import Recipe, Update
from zinf_fx.optim.states import MASTER, State
from zinf_fx.plan.memory.accounting import AT_A_TIME
from zinf_fx.plan.packs import starts_of
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.memory.freelist import round_up
from zinf_fx.runtime.tensor.stored_bytes import side_by_side
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window
from zinf_fx.sizes import WINDOW_ALIGNMENT


class PackedStates:
    """The states of parameters that live side by side, in the place of those of one."""

    def __init__(self, updates: Sequence[Update]) -> None:
        self.updates = updates
        self.parameter = updates[0][1].parameter  # the first
        self.count = sum(charged(states.count) for _, states in updates)
        self.updated = (range(self.count),)
        self.scratch_rows = max(states.scratch_rows for _, states in updates)


def packed(updates: Sequence[Update], elements: int) -> Iterator[list[Update]]:
    """Updates, in the order in which their tensors were made, in groups that can be updated together: of at most so
    many elements, each parameter charged as `chunks.cut` does."""
    together: list[Update] = []
    room = elements
    for update in updates:
        count = charged(update[1].count)
        if together and (count > room or not _joins(together[-1], update)):
            yield together
            together, room = [], elements
        together.append(update)
        room -= count
    if together:
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
    """One tensor of each parameter, in one window."""

    def __init__(self, tensors: Sequence[StoredTensor], updated: Sequence[range], place: Device, load: bool) -> None:
        """`updated`: which elements of each."""
        storages = [tensor.storage for tensor in tensors]
        several = [storage.bytes for storage in storages]
        held = side_by_side(several)
        self.window: Window | DeviceWindow = (held.window if place.in_host_memory else held.device_window)(load=load)
        starts = starts_of([one.count for one in several], held.dtype)
        self._elements: list[slice] = []
        for storage, start, elements in zip(storages, starts, updated, strict=False):
            first = start if storage.share.partitioned else start + elements.start
            self._elements.append(slice(first, first + len(elements)))

    def elements(self) -> list[torch.Tensor]:
        """The elements of each that are updated, 1-D, once they are there."""
        memory = self.window.wait()
        return [memory[elements] for elements in self._elements]


class OpenPack(OpenWindows):
    """The windows of packed states, opened at construction: as `OpenPart`."""

    def __init__(self, states: PackedStates) -> None:
        """Raises: StoreError; no window is open then."""
        self.updates = states.updates
        recipe, first = self.updates[0]
        members = [one for _, one in self.updates]
        self._place, present = recipe.place, recipe.present
        self._updated = [part for one in members for part in one.updated]  # one of each: see `_joins`
        super().__init__()
        try:
            gradients = [one.gradient for one in members]
            self._gradient = self._open(gradients, True) if isinstance(gradients[0], StoredTensor) else None
            self._master = None
            if first.has_master:
                self._master = self._open([one.tensors[MASTER] for one in members], MASTER in present)
            self._has_masters = MASTER in present
            self._refresh = any(one.refresh for one in members)
            self._parameter = self._open([one.parameter for one in members], self._master is None or self._refresh)
            self._states = {
                name: self._open([one.tensors[name] for one in members], name in present) for name in recipe.names
            }
        except BaseException:
            self.close()
            raise

    @property
    def parameters(self) -> list[StoredTensor]:
        """Those that are updated."""
        return [states.parameter for _, states in self.updates]

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that the update changes."""
        several = zip(self.updates, self._updated, strict=True)
        return sum(len(part) * t.dtype.itemsize for (_, states), part in several for t in states.tensors.values())

    def wait(self) -> None:
        """After the reads, take over what others wrote to the parameters: see `OpenPart.wait`."""
        for window in self._windows:
            window.wait()
        if self._master is not None and self._refresh:
            for weights, parameter in zip(self._master.elements(), self._parameter.elements(), strict=True):
                take_over_written(weights, parameter, self._has_masters)

    def update(
        self,
        borrowed: Callable[[Group, Device], Optimizer],
        shown: Mapping[torch.Tensor, State],
        scratch: torch.Tensor | None,
    ) -> None:
        """Run the torch class, once for each group of options and some elements. `borrowed`: the class under a group's
        options; `shown`: the optimizer's state, which gets what isn't stored; `scratch`: as `OpenPiece.begin`."""
        parameters = self._parameter.elements()
        weights = parameters if self._master is None else self._master.elements()
        states = {name: row.elements() for name, row in self._states.items()}
        if self._gradient is not None:
            gradients = self._gradient.elements()
        else:
            place = self._place.torch_device
            flat = [one.gradient.detach().reshape(-1).to(place) for _, one in self.updates]
            gradients = [one[part.start : part.stop] for one, part in zip(flat, self._updated, strict=True)]
        for numbers in self._together(AT_A_TIME if self._place is CPU else None):
            recipe = self.updates[numbers[0]][0]
            inner = borrowed(recipe.group, self._place)
            counts_at = self._place if recipe.group.get("fused") else CPU
            rows, offset = None if scratch is None else scratch.flatten(1).view(recipe.dtype), 0
            inner.param_groups[0]["params"] = [weights[number] for number in numbers]
            for number in numbers:
                one, count = self.updates[number][1], weights[number].numel()
                entry = shown[one.parameter.whole]
                scalars = {k: moved(v, counts_at) for k, v in entry.items() if k not in one.tensors}
                memory = {name: elements[number] for name, elements in states.items()}
                room = None if rows is None else rows[:, offset:]
                state = begin_update(weights[number], gradients[number], memory, recipe.present, one.rounded, room)
                inner.state[weights[number]] = scalars | state
                offset += round_up(count, WINDOW_ALIGNMENT)
            step_without_hooks(inner)
            for number in numbers:
                memory = {name: elements[number] for name, elements in states.items()}
                scalars = end_update(weights[number], memory, inner.state[weights[number]])
                shown[self.updates[number][1].parameter.whole].update(scalars)
            if self._master is not None:
                torch._foreach_copy_([parameters[n] for n in numbers], [weights[n] for n in numbers])

    def _together(self, elements: int | None) -> Iterator[list[int]]:
        """The numbers of parameters that one call of the class updates: of one group, and at most so many elements."""
        by_recipe: dict[Recipe, list[int]] = {}
        for number, (recipe, _) in enumerate(self.updates):
            by_recipe.setdefault(recipe, []).append(number)
        for several in by_recipe.values():
            numbers: list[int] = []
            room = elements
            for number in several:
                count = charged(len(self._updated[number]))
                if numbers and room is not None and count > room:
                    yield numbers
                    numbers, room = [], elements
                numbers.append(number)
                room = None if room is None else room - count
            yield numbers

    def store(self, unscaled: bool) -> None:
        """Start writing what was updated; with `unscaled`, the gradients are part of that."""
        gradient = None if self._gradient is None else self._gradient.window
        for window in self._windows:
            if window is not gradient or unscaled:
                window.store()

    def _open(self, tensors: Sequence[StoredTensor], load: bool) -> _Row:
        row = _Row(tensors, self._updated, self._place, load)
        self._keep(row.window)
        return row
