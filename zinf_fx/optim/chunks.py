"""Chunks of an optimizer's step: slices that are updated together, and their update by the torch class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from zinf_fx.adam import STATE_BYTES
from zinf_fx.optim.arithmetic import Group, Lists, State, borrow, copied, same_objects, show
from zinf_fx.optim.elements import moved
from zinf_fx.optim.partial_step import Progress
from zinf_fx.optim.slices import OpenSlice, OpenWhole, SliceStates, UpdateGroup
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.threads import at_the_same_time
from zinf_fx.optim.update import Operands, update_elements
from zinf_fx.plan.chunks import Member, cut, elements_of_chunk
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.tiers import Tiers


def chunk_elements(chunk: int, bytes_per_element: int, tiers: Iterable[Tiers]) -> int:
    """Elements of a chunk whose fp32 weights take `chunk` bytes, or as many as a plan has: see `elements_of_chunk`."""
    tiers = list(tiers)
    planned = [tier.chunk_elements for tier in tiers if tier.chunk_elements is not None]
    room = min(tier.host.capacity - tier.host.in_use for tier in tiers)
    return elements_of_chunk(min([chunk // STATE_BYTES, *planned]), bytes_per_element, room)


@contextmanager
def in_turn(tiers: Iterable[Tiers], part: range) -> Iterator[None]:
    """Leases in the block are for the chunk that has this part of the room that is planned for chunks."""
    with ExitStack() as rooms:
        for tier in tiers:
            rooms.enter_context(tier.stepping(part))
        yield


class Part(NamedTuple):
    """Elements of a member that one call updates.

    Attributes:
        slice: the number of the slice in the chunk.
        member: the number of the member in the slice.
        elements: counted from the first of the member in the slice.
        ends: whether these are the last elements of the member that this rank updates.
    """

    slice: int
    member: int
    elements: range
    ends: bool


@dataclass
class Call:
    """One call of the torch class: elements of members of one update group. What isn't stored are copies of what the
    optimizer shows, which shows the new ones once all is on its way to the store.

    Attributes:
        repeats: whether the class left everything where it was, so that the next step may make the same call.
    """

    group: UpdateGroup
    parts: Sequence[Part]
    operands: Sequence[Operands]
    lists: Lists = field(default_factory=Lists)
    repeats: bool = False


class Chunk:
    """Slices of one kind that are updated together."""

    def __init__(self, slices: Sequence[SliceStates]) -> None:
        self.slices, self.kind = slices, slices[0].kind
        self._parts: dict[int, list[tuple[UpdateGroup, list[Part]]]] = {}  # by how many elements a call has
        self._last: tuple[list[list[torch.Tensor]], list[Call]] | None = None  # arrays, and the calls over them

    @property
    def converts(self) -> bool:
        """Whether anything is stored in another dtype or format than the update computes in."""
        return not self.kind.whole and any(states.scratch_rows for updated in self.slices for states in updated.members)

    def parts(self, elements: int) -> list[tuple[UpdateGroup, list[Part]]]:
        """What is updated in one call: at most so many elements, of one group."""
        if elements not in self._parts:
            self._parts = {elements: list(self._divided(elements))}
        return self._parts[elements]

    def _divided(self, elements: int) -> Iterator[tuple[UpdateGroup, list[Part]]]:
        by_group: dict[UpdateGroup, list[tuple[int, int]]] = {}
        for number, states in enumerate(self.slices):
            for member, update in enumerate(states.updates):
                by_group.setdefault(update.group, []).append((number, member))
        for group, members in by_group.items():
            counts = [len(self.slices[number].elements[member]) for number, member in members]
            for pieces in cut([Member([range(count)]) for count in counts], elements):
                parts: list[Part] = []
                for piece in pieces:
                    at, (some,) = piece.members.start, piece.elements
                    number, member = members[at]
                    ends = some.stop == counts[at] and self.slices[number].is_last
                    parts.append(Part(number, member, some, ends))
                yield group, parts

    def calls(self, opened: Sequence[OpenSlice], elements: int, shown: Mapping[torch.Tensor, State]) -> list[Call]:
        """The calls of the torch class, over at most so many elements each. `shown`: the optimizer's state."""
        arrays = [array for opened_slice in opened for array in opened_slice.arrays]
        last, self._last = self._last, None
        if last is not None and same_objects(last[0], arrays):
            calls = last[1]
            numbers = [self._numbers(part, call.group, shown) for call in calls for part in call.parts]
            copies = [operands.numbers for call in calls for operands in call.operands]
            pairs = [(copy[name], mine[name]) for copy, mine in zip(copies, numbers, strict=True) for name in copy]
            tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
            if tensors:
                torch._foreach_copy_(*map(list, zip(*tensors, strict=True)))
            return calls
        return [self._call(group, parts, opened, shown) for group, parts in self.parts(elements)]

    def _call(
        self,
        group: UpdateGroup,
        parts: Sequence[Part],
        opened: Sequence[OpenSlice],
        shown: Mapping[torch.Tensor, State],
    ) -> Call:
        numbers = [copied(self._numbers(part, group, shown)) for part in parts]
        several = zip(parts, numbers, strict=True)
        return Call(group, parts, [opened[p.slice].operands(p.member, p.elements, own) for p, own in several])

    def _numbers(self, part: Part, group: UpdateGroup, shown: Mapping[torch.Tensor, State]) -> State:
        return numbers_of(self.slices[part.slice].members[part.member], group, shown)

    def keep(self, calls: list[Call], opened: Sequence[OpenSlice]) -> None:
        """The calls are made. Keep them for the next step, if all of them may be repeated."""
        if all(call.repeats for call in calls):
            self._last = [array for opened_slice in opened for array in opened_slice.arrays], calls

    def let_go_of_gradients(self) -> None:
        """The gradients are consumed, or the update has failed."""
        if any([states.let_go_of_gradients() for states in self.slices]):
            self._last = None


def numbers_of(states: ParameterStates, group: UpdateGroup, shown: Mapping[torch.Tensor, State]) -> State:
    """The states of a parameter that aren't stored, where the class counts steps: fused kernels do so where they run,
    and the others on the CPU."""
    place = group.kind.place if group.options.get("fused") else CPU
    entry = shown[states.parameter.whole]
    return {name: moved(value, place) for name, value in entry.items() if name not in states.tensors}


class OpenChunk:
    """The windows of a chunk: those of weights and states are opened at construction.

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
        """Bytes of the states that its update changes, masters among them."""
        return sum(states.nbytes for states in self.chunk.slices)

    def close(self) -> None:
        """Close the windows that were not stored."""
        self._close.close()


class _Lane:
    """What calls need for themselves, one at a time: the torch class, borrowed for each group, and scratch."""

    def __init__(self, borrowed: Callable[[Group, Device], Optimizer], scratch: torch.Tensor | None) -> None:
        self._borrowed, self.scratch = borrowed, scratch
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

    def __init__(
        self, optimizer: Optimizer, kind: type[Optimizer], shown: dict[torch.Tensor, State], progress: Progress
    ) -> None:
        """`kind`: the class. `shown`: what the optimizer shows of states. `progress` is told which parameters are begun
        and finished."""
        self._kind = kind
        # Classes of others may have what can't be used by two threads at the same time.
        self._runs_in_threads = kind.__module__.startswith("torch.optim.")
        self._shown = shown
        self._progress = progress
        self._template = borrow(optimizer, kind, {}, [])
        self._template.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer
        self.unscales = getattr(self._template, "grad_scale", None) is not None

    def borrowed(self, options: Group, place: Device) -> Optimizer:
        """The class by the options of a group, to run at `place`."""
        inner = borrow(self._template, self._kind, options, [])
        for name in ("grad_scale", "found_inf"):  # GradScaler's, on the device of the gradients
            if name in vars(inner):
                setattr(inner, name, moved(vars(inner)[name], place))
        return inner

    def run(self, opened: OpenChunk, count: int, elements: int, scratch: torch.Tensor | None) -> None:
        """Update a chunk, some elements at a time: on the CPU, the cache keeps what each operation leaves to the next
        of the gradient in fp32 and of the new weights. See [Note: workers].

        `count`: how many calls are made at the same time, of a class of PyTorch's own, over at most so many `elements`
        each. `scratch`: memory for what these have in other dtypes than that of the update, if anything.
        """
        for opened_slice in opened.slices:
            opened_slice.wait()
        self._progress.begun.update(parameter for states in opened.chunk.slices for parameter in states.parameters)
        if opened.chunk.kind.whole:
            for opened_slice in opened.slices:
                self._update_whole(opened_slice)
        else:
            self._update_elements(opened, count, elements, scratch)

    def _update_elements(self, opened: OpenChunk, count: int, elements: int, scratch: torch.Tensor | None) -> None:
        chunk = opened.chunk
        calls = chunk.calls(opened.slices, elements, self._shown)
        left = Counter(part.slice for call in calls for part in call.parts)
        count = min(count, len(calls)) if self._runs_in_threads else 1
        rooms: Sequence[torch.Tensor | None] = [scratch] * count
        if scratch is not None:
            starts = range(0, count * elements, elements) if count > 1 else [0]
            typed = scratch.flatten(1).view(chunk.kind.dtype)
            rooms = [typed[:, first : first + elements] if count > 1 else typed for first in starts]
        lanes = [_Lane(self.borrowed, room) for room in rooms]
        numbers: dict[ParameterStates, State] = {}
        with closing(at_the_same_time(_run, lanes, calls)) as updated:
            for call, _ in zip(calls, updated, strict=True):
                for part, operands in zip(call.parts, call.operands, strict=True):
                    left[part.slice] -= 1
                    if part.ends:
                        numbers[chunk.slices[part.slice].members[part.member]] = operands.numbers
                    if not left[part.slice]:
                        self._store(opened.slices[part.slice], numbers)
        chunk.keep(calls, opened.slices)

    def _update_whole(self, opened: OpenWhole) -> None:
        ((group, states),) = opened.states.updates
        numbers = copied(numbers_of(states, group, self._shown))
        numbers = opened.update(self.borrowed(group.options, group.kind.place), numbers)
        self._store(opened, {states: numbers})

    def _store(self, opened: OpenSlice, numbers: Mapping[ParameterStates, State]) -> None:
        """A slice is updated, and all before it. Start writing it, and show the states of members that end with it.
        `numbers`: those that aren't stored."""
        opened.store(unscaled=self.unscales)
        if opened.states.is_last:
            kind = opened.states.kind
            for states in opened.states.members:
                show(self._shown[states.parameter.whole], numbers[states])
                if kind.is_first or kind.whole or states.has_master:
                    self._show_stored(states, opened.names)
            self._progress.finish(opened.states.members, opened.states.touched)

    def _show_stored(self, states: ParameterStates, names: Iterable[str]) -> None:
        parameter = states.parameter
        entry = self._shown[parameter.whole]
        entry.update((name, parameter.shown(states.tensors[name])) for name in (*names, *states.masters))
        if states.has_master:
            states.version = parameter.stored.bytes.version


def _run(lane: _Lane, call: Call) -> None:
    is_in_place = update_elements(lane.inner(call.group), call.operands, lane.scratch, call.lists)
    call.repeats = is_in_place and call.group.kind.place is CPU
