"""Sets of whole numbers as ranges, such as the operators of a graph; and spans of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate


def overlap(one: range, other: range) -> bool:
    """Whether two ranges have a number in common, neither of them empty."""
    return one.start < other.stop and other.start < one.stop


def common(one: range, other: range) -> range:
    """The numbers that both have."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def merged(ranges: Iterable[range]) -> list[range]:
    """The same numbers in as few ranges as possible, in order."""
    found: list[range] = []
    for one in sorted(ranges, key=lambda one: one.start):
        if not one:
            continue
        if found and one.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, one.stop))
        else:
            found.append(one)
    return found


def sums(sizes: Sequence[tuple[range, int]], over: range) -> list[int]:
    """For each number of `over`, the sum of the sizes whose ranges it is in; ranges end where `over` ends."""
    change = [0] * (len(over) + 1)
    for one, size in sizes:
        change[max(one.start, over.start) - over.start] += size
        change[min(one.stop, over.stop) - over.start] -= size
    return list(accumulate(change))[:-1]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of these spans, each from a start to an end."""
    seconds, until = 0.0, -math.inf
    for start, end in sorted(spans):
        seconds += max(end - max(start, until), 0.0)
        until = max(end, until)
    return seconds
