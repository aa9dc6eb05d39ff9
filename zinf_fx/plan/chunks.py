"""How an optimizer's step is cut into chunks, and where these lie: one rule, for plans and for the steps that run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zinf_fx.plan.schedule import CHUNKS
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up

# Elements of a chunk that the CPU updates at a time: with their states they fit its cache, and PyTorch's overhead for
# an operation is small beside the operation.
AT_A_TIME = 1 << 20
# Elements of a chunk, at most, that the CPU's threads update at the same time, in pieces.
AT_ONCE = 8 * AT_A_TIME
# Chunks that a limited host arena must have room for: one to spare.
_CHUNKS_IN_MEMORY = CHUNKS + 1


class Member(NamedTuple):
    """A parameter, as far as cutting is concerned.

    Attributes:
        parts: the elements that this rank updates; each part is contiguous.
        joins: whether it is in the same group as the member before, so that one transfer moves both.
    """

    parts: Sequence[range]
    joins: bool = False


@dataclass(frozen=True)
class ChunkSlice:
    """What is read and written at a time: a run of whole members, or a range of elements of one.

    Attributes:
        members: their numbers.
        elements: of each member. They begin at a multiple of WINDOW_ALIGNMENT behind the first of a part.
        is_last: whether this rank updates no element of the members behind these.
    """

    members: range
    elements: tuple[range, ...]
    is_last: bool = True


def elements_of_chunk(most: int, bytes_per_element: int = 0, room: int | None = None) -> int:
    """Elements of a chunk: `most`, or fewer where memory is limited and has `room` for fewer of the chunks that are
    there at a time and one to spare, of so many bytes per element. A multiple of WINDOW_ALIGNMENT."""
    if room is not None:
        most = min(most, max(room, 0) // max(_CHUNKS_IN_MEMORY * bytes_per_element, 1))
    return max(most // WINDOW_ALIGNMENT, 1) * WINDOW_ALIGNMENT


def charged(count: int) -> int:
    """Return what so many elements of a member are charged for in a chunk: it bounds chunks of many small ones, too."""
    return round_up(max(count, 1), WINDOW_ALIGNMENT)


def cut(members: Sequence[Member], elements: int, together: int = 0) -> Iterator[tuple[ChunkSlice, ...]]:
    """Cut members, in order, into chunks of at most `elements` elements.

    Members of one group, of at most `together` elements each, are one slice, which isn't cut. Vectorised kernels
    treat the end of a tensor differently, so that slices end where such a kernel would not care.
    """
    assert elements > 0 and elements % WINDOW_ALIGNMENT == 0, elements
    chunk: list[ChunkSlice] = []
    room = elements
    for run in _runs(members, elements, together):
        if len(run) > 1:
            count = sum(charged(_count(members[number])) for number in run)
            if count > room:
                yield tuple(chunk)
                chunk, room = [], elements
            chunk.append(ChunkSlice(run, tuple(part for number in run for part in members[number].parts)))
            room -= count
            if not room:
                yield tuple(chunk)
                chunk, room = [], elements
            continue
        parts = members[run.start].parts
        for number, part in enumerate(parts, start=1):
            start, ends = part.start, False
            while not ends:
                count = min(part.stop - start, room)
                ends = start + count == part.stop
                chunk.append(ChunkSlice(run, (range(start, start + count),), ends and number == len(parts)))
                start += count
                room -= charged(count)
                if not room:
                    yield tuple(chunk)
                    chunk, room = [], elements
    if chunk:
        yield tuple(chunk)


def _runs(members: Sequence[Member], elements: int, together: int) -> Iterator[range]:
    """Members that are in one slice: runs of at most `elements` elements."""
    first = room = 0
    for number, member in enumerate(members):
        count = charged(_count(member))
        if number > first:
            small = max(_count(member), _count(members[number - 1])) <= together
            if not (member.joins and small and count <= room):
                yield range(first, number)
                first = number
        room = (elements if number == first else room) - count
    if members:
        yield range(first, len(members))


def _count(member: Member) -> int:
    return sum(map(len, member.parts))


def part_of(number: int, nbytes: int, behind: int = 0, count: int = CHUNKS) -> range:
    """The part of the planned room that chunk `number`, of at most `nbytes`, has: behind the first bytes, chunks take
    turns in `count` equal parts, so that each finds its part free."""
    first = behind + number % count * nbytes
    return range(first, first + nbytes)
