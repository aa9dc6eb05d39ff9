"""Native work on many values, divided among threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

# Values that are worth a thread of their own: about 0.05 ms of work, where handing it over takes 0.02.
_WORTH_A_THREAD = 1 << 17

_threads: ThreadPoolExecutor | None = None


def starts_of(units: int, values: int, threads: int) -> list[int]:
    """Where the shares of threads begin, and where the last one ends: at most so many, each of some of the units in a
    row, which have so many values together."""
    shares = max(min(threads, units, values // _WORTH_A_THREAD), 1)
    return [units * share // shares for share in range(shares + 1)]


def on_threads(work: Callable[[int, int], None], starts: Sequence[int]) -> None:
    """Do all shares, each given where it begins and where the next one does; the first is done here."""
    global _threads
    (first, *rest), others = pairwise(starts), []
    if rest:
        _threads = _threads or ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="zinf-values")
        others = [_threads.submit(work, *share) for share in rest]
    work(*first)
    for other in others:
        other.result()


def _after_fork() -> None:
    """A child has none of the threads."""
    global _threads
    _threads = None


os.register_at_fork(after_in_child=_after_fork)
