"""Chunks of an optimizer's step: slices that are updated together, and their update by the torch class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from zinf_fx.adam import STATE_BYTES
from zinf_fx.optim.arithmetic import Group, State, TensorLists, borrow, copied, show
from zinf_fx.optim.elements import moved
from zinf_fx.optim.kernels import NativeOperands, has_kernel
from zinf_fx.optim.partial_step import Progress
from zinf_fx.optim.recurrence import same_objects
from zinf_fx.optim.slices import OpenNonElementwise, OpenSlice, SliceStates, Update, UpdateGroup
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.threads import at_the_same_time
from zinf_fx.optim.update import Operands, update_elements
from zinf_fx.plan.chunks import Member, charged, cut, elements_of_chunk
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.tiers import Tiers


def chunk_elements(chunk: int, bytes_per_element: int, tiers: Iterable[Tiers]) -> int:
    """Return the elements of a chunk whose fp32 weights take `chunk` bytes, or as many as a plan has: see
    `elements_of_chunk`."""
    tiers = list(tiers)
    planned = [tier.chunk_elements for tier in tiers if tier.chunk_elements is not None]
    room = min(tier.host.capacity - tier.host.in_use for tier in tiers)
    return elements_of_chunk(min([chunk // STATE_BYTES, *planned]), bytes_per_element, room)


@contextmanager
def in_turn(tiers: Iterable[Tiers], part: range) -> Iterator[None]:
    """Open a block whose buffers are for the chunk that has this part of the room that is planned for chunks."""
    with ExitStack() as rooms:
        for tier in tiers:
            rooms.enter_context(tier.stepping(part))
        yield


class Part(NamedTuple):
    """Elements of a member that one call updates.

    Attributes:
        slice: the number of the slice in the chunk.
        member: the number of the member in the slice.
        elements: which elements these are, counted from the first of the member in the slice.
        ends: whether these are the last elements of the member that this rank updates.
    """

    slice: int
    member: int
    elements: range
    ends: bool


@dataclass
class Call:
    """One call of the torch class: elements of members of one update group.

    Attributes:
        ended: the numbers of the slices whose last part this is, in the order of calls.
        operands: the operands of each part. What isn't stored are copies of what the optimizer shows, which shows the
            new ones once all is on its way to the store.
        lists: what the next call over the same operands is made with, if the class left everything where it was.
    """

    group: UpdateGroup
    parts: Sequence[Part]
    ended: Sequence[int]
    operands: Sequence[Operands] = ()
    lists: TensorLists | NativeOperands | None = None


class Chunk:
    """Slices of one kind that are updated together."""

    def __init__(self, slices: Sequence[SliceStates]) -> None:
        self.slices, self.kind = slices, slices[0].kind
        self._has_kernels = self.kind.place is CPU  # as far as is known: whether a native one takes every operand
        self._calls: tuple[int, list[Call]] = 0, []  # by how many elements a call has
        self._arrays: list[list[torch.Tensor]] | None = None  # over which the same calls can be made again
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # in the calls, of what is shown

    @cached_property
    def converts(self) -> bool:
        """Whether anything is stored in another dtype or format than the update computes in."""
        members = (states for piece in self.slices for states in piece.members)
        return not self.kind.non_elementwise and any([states.scratch_rows for states in members])

    def calls(self, opened: Sequence[OpenSlice], elements: int) -> list[Call]:
        """Return the calls of the torch class, over at most so many elements each."""
        if self._calls[0] != elements:
            self._arrays, self._calls = None, (elements, self._divided(elements))
        _, calls = self._calls
        arrays, self._arrays = self._arrays, None
        if arrays is not None and same_objects(arrays, _arrays_of(opened)):
            copies, shown = self._copies
            if copies:
                torch._foreach_copy_(copies, shown)
            return calls
        for call in calls:
            call.operands, call.lists = [self._operands(part, opened) for part in call.parts], None
        return calls

    def native_calls(self, opened: Sequence[OpenSlice], inner: Callable[[UpdateGroup], Optimizer]) -> list[Call] | None:
        """Return a call for each update group, over all of its elements, whose native kernel divides them among threads
        of its own; None where any group has no kernel. `inner` gives the torch class with a group's options."""
        groups = {update.group for states in self.slices for update in states.updates}
        if not self._has_kernels or not all([has_kernel(inner(group)) for group in groups]):
            return None
        calls = self.calls(opened, sum([charged(len(part)) for states in self.slices for part in states.elements]))
        for call in calls:
            if not isinstance(call.lists, NativeOperands):
                call.lists = NativeOperands.of(inner(call.group), call.operands)
        self._has_kernels = all([call.lists is not None for call in calls])
        return calls if self._has_kernels else None

    def _divided(self, elements: int) -> list[Call]:
        by_group: dict[UpdateGroup, list[tuple[int, int]]] = {}
        for number, states in enumerate(self.slices):
            for member, update in enumerate(states.updates):
                by_group.setdefault(update.group, []).append((number, member))
        divided: list[tuple[UpdateGroup, list[Part]]] = []
        for group, members in by_group.items():
            counts = [len(self.slices[number].elements[member]) for number, member in members]
            for pieces in cut([Member([range(count)]) for count in counts], elements):
                parts: list[Part] = []
                for piece in pieces:
                    at, (elements_of_part,) = piece.members.start, piece.elements
                    number, member = members[at]
                    ends = elements_of_part.stop == counts[at] and self.slices[number].is_last
                    parts.append(Part(number, member, elements_of_part, ends))
                divided.append((group, parts))
        latest = {part.slice: number for number, (_, parts) in enumerate(divided) for part in parts}
        ended = [[updated for updated, last in latest.items() if last == number] for number in range(len(divided))]
        return [Call(group, parts, ends) for (group, parts), ends in zip(divided, ended, strict=True)]

    def _operands(self, part: Part, opened: Sequence[OpenSlice]) -> Operands:
        numbers = copied(numbers_of(self.slices[part.slice].updates[part.member]))
        return opened[part.slice].operands(part.member, part.elements, numbers)

    def keep(self, opened: Sequence[OpenSlice]) -> None:
        """After the calls, when what the class left is shown: keep them for the next step, if all may be repeated."""
        _, calls = self._calls
        if any([call.lists is None for call in calls]):
            self._forget()
            return
        arrays = _arrays_of(opened)
        self._copies = [], []
        for call in calls:
            for part, operands in zip(call.parts, call.operands, strict=True):
                entry = self.slices[part.slice].updates[part.member].entry
                for name, copy in operands.numbers.items():
                    if not (isinstance(copy, torch.Tensor) and isinstance(entry.get(name), torch.Tensor)):
                        self._forget()
                        return
                    self._copies[0].append(copy)
                    self._copies[1].append(entry[name])
        self._arrays = arrays

    def let_go_of_gradients(self) -> None:
        """Drop the gradients, which are consumed, or whose update has failed."""
        if any([states.let_go_of_gradients() for states in self.slices]):
            self._forget()

    def _forget(self) -> None:
        """Hold no memory that was updated."""
        self._arrays, self._copies = None, ([], [])
        for call in self._calls[1]:
            call.operands, call.lists = (), None


def _arrays_of(opened: Sequence[OpenSlice]) -> list[list[torch.Tensor]]:
    return [array for opened_slice in opened for array in opened_slice.arrays]


def numbers_of(update: Update) -> State:
    """Return the states of a parameter that aren't stored, where the class counts steps: fused kernels do so where they
    run, and the others on the CPU."""
    place = update.group.kind.place if update.group.options.get("fused") else CPU
    stored = update.states.tensors
    return {name: moved(value, place) for name, value in update.entry.items() if name not in stored}


class OpenChunk:
    """The windows of a chunk. Those of weights and states are opened at construction.

    Attributes:
        number: how many chunks of the step were opened before.
    """

    def __init__(self, chunk: Chunk, number: int = 0) -> None:
        """Raises: StoreError; no window is open then."""
        self.chunk, self.number = chunk, number
        self._with_gradient = 0  # of the slices, from the first on
        self.slices: list[OpenSlice] = []
        self._close = ExitStack()
        try:
            for states in chunk.slices:
                self.slices.append(opened := states.open())
                self._close.callback(opened.close)
        except BaseException:
            self.close()
            raise

    @property
    def lacks_gradients(self) -> bool:
        """Whether any slice has no gradient open yet."""
        return self._with_gradient < len(self.slices)

    def open_gradients(self) -> None:
        """Open the gradients, which are final, of the slices that have none open yet. Raises: StoreError."""
        while self.lacks_gradients:
            self.slices[self._with_gradient].open_gradient()
            self._with_gradient += 1

    @property
    def is_current(self) -> bool:
        """Whether its windows would not be opened otherwise now."""
        return all(opened.is_current for opened in self.slices)

    @property
    def ready(self) -> bool:
        """Whether all of its reads are done."""
        return all(opened.ready for opened in self.slices)

    def arrive(self) -> None:
        """Wait for its reads, and change nothing."""
        for opened in self.slices:
            opened.arrive()

    @property
    def states_nbytes(self) -> int:
        """The bytes of the states that its update changes, masters among them."""
        return sum(states.nbytes for states in self.chunk.slices)

    def close(self) -> None:
        """Close the windows that were not stored."""
        self._close.close()


class _Lane:
    """What calls need for themselves, one at a time: the torch class, borrowed for each group, and scratch."""

    def __init__(
        self, borrowed: Callable[[Group, Device], Optimizer], scratch: torch.Tensor | None, threads: int = 1
    ) -> None:
        self._borrowed, self.scratch, self.threads = borrowed, scratch, threads
        self._inner: dict[UpdateGroup, Optimizer] = {}

    def inner(self, group: UpdateGroup) -> Optimizer:
        if group not in self._inner:
            self._inner[group] = self._borrowed(group.options, group.kind.place)
        return self._inner[group]


class ChunkUpdate:
    """The update of the chunks of one step, by the arithmetic of one torch class.

    What decides the result besides the options of groups, which come with each chunk, is read from the optimizer at
    construction. The optimizer itself is not held.

    Attributes:
        unscales: whether the arithmetic divides the gradients by a GradScaler's scale.
    """

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer], progress: Progress) -> None:
        """`kind` is the torch class. `progress` is told which parameters are begun and finished."""
        self._kind = kind
        # Classes of others may have what can't be used by two threads at the same time.
        self._runs_in_threads = kind.__module__.startswith("torch.optim.")
        self._progress = progress
        self._template = borrow(optimizer, kind, {}, [])
        self._template.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer
        self.unscales = getattr(self._template, "grad_scale", None) is not None
        self._for_kernels: _Lane | None = None

    def borrowed(self, options: Group, place: Device) -> Optimizer:
        """Return the class by the options of a group, to run at `place`."""
        inner = borrow(self._template, self._kind, options, [])
        for name in ("grad_scale", "found_inf"):  # GradScaler's, on the device of the gradients
            if name in vars(inner):
                setattr(inner, name, moved(vars(inner)[name], place))
        return inner

    def run(self, opened: OpenChunk, count: int, elements: int, scratch: torch.Tensor | None, threads: int) -> None:
        """Update a chunk: by one call of a native kernel where there is one, else by the torch class, some elements at
        a time. On the CPU, the cache keeps what each of its operations leaves to the next. See [Note: workers].

        `count`: how many calls of a class of PyTorch's own are made at the same time, over at most so many `elements`
        each. `scratch`: memory for what these have in other dtypes than that of the update, if anything. `threads`: how
        many share the elements of a native call.
        """
        for opened_slice in opened.slices:
            opened_slice.wait()
        for opened_slice in opened.slices:
            self._progress.begun.update(opened_slice.states.parameters)
        if opened.chunk.kind.non_elementwise:
            for opened_slice in opened.slices:
                self._update_whole(opened_slice)
        else:
            self._update_elements(opened, count, elements, scratch, threads)

    def _update_elements(
        self, opened: OpenChunk, count: int, elements: int, scratch: torch.Tensor | None, threads: int
    ) -> None:
        chunk = opened.chunk
        if self._for_kernels is None:
            self._for_kernels = _Lane(self.borrowed, None, threads)
        lanes = [self._for_kernels]
        calls = chunk.native_calls(opened.slices, self._for_kernels.inner)
        if calls is None:
            calls = chunk.calls(opened.slices, elements)
            lanes = self._lanes(chunk, min(count, len(calls)) if self._runs_in_threads else 1, elements, scratch)
        numbers: dict[ParameterStates, State] = {}
        with closing(at_the_same_time(_run, lanes, calls)) as updated:
            for call, _ in zip(calls, updated, strict=True):
                for part, operands in zip(call.parts, call.operands, strict=True):
                    if part.ends:
                        numbers[chunk.slices[part.slice].members[part.member]] = operands.numbers
                for number in call.ended:
                    self._store(opened.slices[number], numbers)
        chunk.keep(opened.slices)

    def _lanes(self, chunk: Chunk, count: int, elements: int, scratch: torch.Tensor | None) -> list[_Lane]:
        if scratch is None:
            return [_Lane(self.borrowed, None) for _ in range(count)]
        typed = scratch.flatten(1).view(chunk.kind.dtype)
        starts = range(0, count * elements, elements)
        rooms = [typed[:, first : first + elements] for first in starts] if count > 1 else [typed]
        return [_Lane(self.borrowed, room) for room in rooms]

    def _update_whole(self, opened: OpenSlice) -> None:
        assert isinstance(opened, OpenNonElementwise)
        (update,) = opened.states.updates
        inner = self.borrowed(update.group.options, update.group.kind.place)
        self._store(opened, {update.states: opened.update(inner, copied(numbers_of(update)))})

    def _store(self, opened: OpenSlice, numbers: Mapping[ParameterStates, State]) -> None:
        """Start writing a slice, which is updated as all before it are, and show the states of members that end with
        it. `numbers` are the states that aren't stored."""
        opened.store(unscaled=self.unscales)
        updated = opened.states
        if not updated.is_last:
            return
        show([update.entry for update in updated.updates], [numbers[states] for states in updated.members])
        if updated.kind.is_first or updated.kind.non_elementwise or updated.has_masters:
            for update in updated.updates:
                _show_stored(update, opened.names)
        self._progress.finish(updated.parameters, updated.touched)


def _show_stored(update: Update, names: Iterable[str]) -> None:
    states, parameter = update.states, update.states.parameter
    update.entry.update((name, parameter.shown(states.tensors[name])) for name in (*names, *states.masters))
    if states.has_master:
        states.version = parameter.stored.bytes.version


def _run(lane: _Lane, call: Call) -> None:
    lists = update_elements(lane.inner(call.group), call.operands, lane.scratch, call.lists, lane.threads)
    call.lists = lists if call.group.kind.place is CPU else None
