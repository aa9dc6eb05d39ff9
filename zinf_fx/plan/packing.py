"""Offsets for buffers whose lifetimes are known, so that those needed at a time never share bytes.

Packing is offline dynamic storage allocation, which is NP-hard; greedy by size or by length, into the smallest gap
that fits, is what compilers for small devices use (Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural
Net Inference", section 5.2), and in practice about optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from zinf_fx.plan.lifetimes import Lifetime, overlap, profile

# Placements of one buffer each that are tried per order, besides a first one of all.
_WORK = 1000
# Lifetimes are looked up in so many parts of the clock.
_PARTS = 256


class Packing(NamedTuple):
    """Where each buffer lies, in the order given, and the largest end."""

    offsets: tuple[int, ...]
    nbytes: int


def pack(buffers: Sequence[Lifetime], end: int, bottom: int = 0) -> Packing:
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
            found = _place(buffers, [*first, always, *([number] for number in order)], end)
            if best is None or found.nbytes < best.nbytes:
                best = found
            if best.nbytes == least:
                return best
            # What lies highest comes first in the next try.
            highest = {n for n in rest if found.offsets[n] + buffers[n].nbytes == found.nbytes}
            order = [*sorted(highest), *(n for n in order if n not in highest)]
    return best


def _length(buffer: Lifetime) -> int:
    return sum(map(len, buffer.spans))


_ORDERS: tuple[Callable[[Lifetime], tuple[int, ...]], ...] = (
    lambda b: (-_length(b), -b.nbytes),
    lambda b: (-b.nbytes, -_length(b)),
    lambda b: (-b.nbytes * _length(b),),
    lambda b: (b.spans[0].start,),
)


def _place(buffers: Sequence[Lifetime], order: Sequence[Sequence[int]], end: int) -> Packing:
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
    """The buffers that have their places, by when they are needed."""

    def __init__(self, end: int) -> None:
        self._scale = max(-(-end // _PARTS), 1)
        self._parts: list[dict[int, _Place]] = [{} for _ in range(_PARTS)]
        self._count = 0

    def add(self, spans: tuple[range, ...], start: int, stop: int) -> None:
        """A buffer from byte `start` to `stop`, which is needed in `spans`."""
        for part in self._parts_of(spans):
            part[self._count] = (spans, (start, stop))
        self._count += 1

    def beside(self, spans: tuple[range, ...]) -> list[tuple[int, int]]:
        """The bytes of those that are needed in `spans` too."""
        seen: dict[int, _Place] = {}
        for part in self._parts_of(spans):
            seen |= part
        return [taken for others, taken in seen.values() if overlap(spans, others)]

    def _parts_of(self, spans: tuple[range, ...]) -> Iterator[dict[int, _Place]]:
        for span in spans:
            if span:
                yield from self._parts[span.start // self._scale : (span.stop - 1) // self._scale + 1]


_Place = tuple[tuple[range, ...], tuple[int, int]]
"""When a buffer is needed, and where it lies."""
