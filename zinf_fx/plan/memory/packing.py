"""Offsets for buffers whose lifetimes are known, so that those needed at a time never share bytes.

Packing is offline dynamic storage allocation, which is NP-hard; greedy by size or by length, into the smallest gap
that fits, is what compilers for small devices use (Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural
Net Inference", section 5.2), and in practice about optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from zinf_fx.plan.memory.buffers import PlannedBuffer, profile

# Placements of one buffer each that are tried per order, besides a first one of all.
_WORK = 1000
# Lifetimes are looked up in parts of the clock, of so many times each: a little longer than most of them are.
_PART = 64


class Packing(NamedTuple):
    """Where each buffer lies, in the order given, and the largest end."""

    offsets: tuple[int, ...]
    nbytes: int


def pack(buffers: Sequence[PlannedBuffer], end: int, bottom: int = 0) -> Packing:
    """Offsets for `buffers` on a clock that ends at `end`. The first `bottom` of them are placed first, lowest.

    The best of several orders; no less than the most that is needed at a time, which ends the search.
    """
    least = max(profile(buffers, end), default=0)
    first = [[number] for number in range(bottom)]
    always = [n for n, b in enumerate(buffers) if n >= bottom and b.spans == (range(end),)]
    rest = sorted(set(range(bottom, len(buffers))) - set(always))
    tries = max(_WORK // max(len(rest), 1), 1)
    best: Packing | None = None
    for key in _ORDERS:
        order = sorted(rest, key=lambda n: key(buffers[n]))
        for _ in range(tries):
            packing = _place(buffers, [*first, always, *([number] for number in order)], end)
            if best is None or packing.nbytes < best.nbytes:
                best = packing
            if best.nbytes == least:
                return best
            # What lies highest comes first in the next try.
            highest = {n for n in rest if packing.offsets[n] + buffers[n].nbytes == packing.nbytes}
            order = [*sorted(highest), *(n for n in order if n not in highest)]
    assert best is not None
    return best


def _length(buffer: PlannedBuffer) -> int:
    return sum(map(len, buffer.spans))


_ORDERS: tuple[Callable[[PlannedBuffer], tuple[int, ...]], ...] = (
    lambda b: (-_length(b), -b.nbytes),
    lambda b: (-b.nbytes, -_length(b)),
    lambda b: (-b.nbytes * _length(b),),
    lambda b: (b.spans[0].start,),
)


def _place(buffers: Sequence[PlannedBuffer], order: Sequence[Sequence[int]], end: int) -> Packing:
    """Each in turn into the smallest gap between those that are there at a time, or above them. Several that are needed
    at the same times are placed in one piece."""
    offsets = [0] * len(buffers)
    placed = _Placed(end)
    largest = 0
    for numbers in order:
        if not numbers:
            continue
        spans = buffers[numbers[0]].spans
        nbytes = sum(buffers[number].nbytes for number in numbers)
        offset = _smallest_gap(sorted(placed.beside(spans)), nbytes)
        placed.add(spans, offset, offset + nbytes)
        for number in numbers:
            offsets[number] = offset
            offset += buffers[number].nbytes
        largest = max(largest, offset)
    return Packing(tuple(offsets), largest)


def _smallest_gap(taken: Sequence[tuple[int, int]], nbytes: int) -> int:
    """The start of the smallest gap between intervals, sorted, that holds so many bytes; else the largest end."""
    best: tuple[int, int] | None = None
    top = 0
    for start, stop in taken:
        if start - top >= nbytes and (best is None or start - top < best[0]):
            best = (start - top, top)
        top = max(top, stop)
    return top if best is None else best[1]


class _Placed:
    """The buffers that have their places: a record for each span of one, in each part of the clock that it touches."""

    def __init__(self, end: int) -> None:
        self._all: list[_Record] = []
        self._parts: list[list[_Record]] = [[] for _ in range(end // _PART + 1)]

    def add(self, spans: tuple[range, ...], start: int, stop: int) -> None:
        """A buffer from byte `start` to `stop`, which is needed in `spans`."""
        for span in filter(None, spans):
            record = (span.start, span.stop, (start, stop))
            self._all.append(record)
            for part in self._parts_of(span):
                part.append(record)

    def beside(self, spans: tuple[range, ...]) -> set[tuple[int, int]]:
        """The bytes of those that are needed in `spans` too."""
        taken_beside: set[tuple[int, int]] = set()
        for span in filter(None, spans):
            parts = self._parts_of(span)
            # Most are beside one that is needed for long.
            records = self._all if sum(map(len, parts)) > len(self._all) else chain.from_iterable(parts)
            begin, end = span.start, span.stop
            taken_beside.update([taken for first, last, taken in records if first < end and begin < last])
        return taken_beside

    def _parts_of(self, span: range) -> list[list[_Record]]:
        return self._parts[span.start // _PART : (span.stop - 1) // _PART + 1]


_Record = tuple[int, int, tuple[int, int]]
"""The times from and until which a buffer is needed, and where it lies."""
