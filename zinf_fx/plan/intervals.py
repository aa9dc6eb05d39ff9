"""Sets of whole numbers as ranges, such as the operators of a graph; and spans of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate


def overlap(first: range, second: range) -> bool:
    """Whether two ranges have a number in common, neither of them empty."""
    return first.start < second.stop and second.start < first.stop


def common(first: range, second: range) -> range:
    """The numbers that both have."""
    return range(max(first.start, second.start), min(first.stop, second.stop))


def merged(ranges: Iterable[range]) -> list[range]:
    """Join ranges: return the same numbers in as few of them as possible, in order."""
    joined: list[range] = []
    for part in sorted(ranges, key=lambda part: part.start):
        if not part:
            continue
        if joined and part.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, part.stop))
        else:
            joined.append(part)
    return joined


def sums(sizes: Sequence[tuple[range, int]], over: range) -> list[int]:
    """For each number of `over`, the sum of the sizes whose ranges it is in; ranges end where `over` ends."""
    change = [0] * (len(over) + 1)
    for numbers, size in sizes:
        change[max(numbers.start, over.start) - over.start] += size
        change[min(numbers.stop, over.stop) - over.start] -= size
    return list(accumulate(change))[:-1]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of these spans, each from a start to an end."""
    seconds, until = 0.0, -math.inf
    for start, end in sorted(spans):
        seconds += max(end - max(start, until), 0.0)
        until = max(end, until)
    return seconds
