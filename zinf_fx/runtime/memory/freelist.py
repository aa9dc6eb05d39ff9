"""Free intervals of a linear space: an arena's memory, a file's blocks."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from zinf_fx.sizes import round_up


class FreeList:
    """Disjoint free intervals [start, end), sorted, never touching each other."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._free = list(intervals)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The free intervals as pairs (start, end), lowest first."""
        return iter(list(self._free))

    @property
    def nbytes(self) -> int:
        """Bytes that are free."""
        return sum(end - start for start, end in self._free)

    @property
    def largest(self) -> int:
        """Bytes of the largest free interval."""
        return max((end - start for start, end in self._free), default=0)

    def take(self, nbytes: int, alignment: int, within: range | None = None) -> int | None:
        """The start of `nbytes` bytes, aligned, out of the smallest interval that holds them; the lowest of equals.

        `within`: where they are to lie; default anywhere. None if no interval has room for them.
        """
        first, last = 0, len(self._free)
        if within is not None:
            first, last = self._first_after(within.start), bisect_left(self._free, (within.stop,))
        best: tuple[int, int, int] | None = None
        for index in range(first, last):
            start, end = self._free[index]
            if within is not None:
                start, end = max(start, within.start), min(end, within.stop)
            size = end - start
            if size < nbytes or (best is not None and size >= best[0]):
                continue
            aligned = round_up(start, alignment)
            if aligned + nbytes <= end:
                best = (size, index, aligned)
                if size == nbytes:
                    break
        if best is None:
            return None
        _, index, aligned = best
        self._cut(index, aligned, aligned + nbytes)
        return aligned

    def discard(self, start: int, end: int) -> None:
        """Makes [start, end) not free, whatever of it is."""
        while (index := self._first_after(start)) < len(self._free) and self._free[index][0] < end:
            self._cut(index, start, end)

    def give(self, start: int, nbytes: int) -> None:
        """Makes [start, start + nbytes) free. It must not be free yet, not in part either."""
        if not nbytes:
            return
        end = start + nbytes
        before = after = self._first_after(start)
        assert after == len(self._free) or end <= self._free[after][0], f"[{start}, {end}) overlaps a free interval"
        if after < len(self._free) and self._free[after][0] == end:
            end, after = self._free[after][1], after + 1
        if before and self._free[before - 1][1] == start:
            start, before = self._free[before - 1][0], before - 1
        self._free[before:after] = [(start, end)]

    def free_before(self, end: int) -> int:
        """Bytes of the free interval that ends at `end`, where all free ones do; 0 if none does."""
        return end - self._free[-1][0] if self._free and self._free[-1][1] == end else 0

    def _first_after(self, start: int) -> int:
        """The index of the first interval that ends after `start`."""
        return bisect_right(self._free, start, key=itemgetter(1))

    def _cut(self, index: int, start: int, end: int) -> None:
        """Take what [start, end) has of an interval out of it."""
        first, last = self._free[index]
        self._free[index : index + 1] = [piece for piece in ((first, start), (end, last)) if piece[0] < piece[1]]


class Space:
    """A free list that threads share, and that knows how much is taken.

    [Note: giving back in the garbage collector]  What is taken from a space often goes back in a finalizer, and the
    garbage collector may run one in the middle of any method here, in the thread that holds the lock. So `give` never
    waits for the lock: it leaves a note, which whoever gets the lock next acts on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = FreeList()
        self._returned: deque[tuple[int, int]] = deque()
        self._in_use = 0
        self._size = 0
        self._untouched = FreeList()
        self.peak = 0
        """The most bytes that were taken at a time."""

    @property
    def in_use(self) -> int:
        """Bytes taken."""
        self._act_on_notes()
        return self._in_use

    @property
    def largest(self) -> int:
        """Bytes of the largest free interval."""
        with self._lock:
            self._take_back()
            return self._free.largest

    @property
    def touched(self) -> int:
        """Bytes that were taken at any time since the last `restart`."""
        with self._lock:
            return self._size - self._untouched.nbytes

    def restart(self) -> None:
        """Measure `peak` and `touched` from now on."""
        with self._lock:
            self._take_back()
            self.peak = self._in_use
            self._untouched = FreeList(self._free)

    def take(self, nbytes: int, alignment: int, within: range | None = None) -> int | None:
        """Take space, with what was returned meanwhile: see `FreeList.take`."""
        with self._lock:
            self._take_back()
            start = self._free.take(nbytes, alignment, within)
            if start is not None:
                self._in_use += nbytes
                self.peak = max(self.peak, self._in_use)
                self._untouched.discard(start, start + nbytes)
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Gives back what `take` returned. Safe in a finalizer."""
        self._returned.append((start, nbytes))
        self._act_on_notes()

    def extend(self, start: int, nbytes: int) -> None:
        """Adds an interval that was never part of the space."""
        with self._lock:
            self._free.give(start, nbytes)
            self._untouched.give(start, nbytes)
            self._size += nbytes

    def free_before(self, end: int) -> int:
        """Return what is free, with what was returned meanwhile: see `FreeList.free_before`."""
        with self._lock:
            self._take_back()
            return self._free.free_before(end)

    def visit_free(self, visit: Callable[[int, int], None]) -> None:
        """Calls `visit(start, end)` for every free interval, while nobody can take one."""
        with self._lock:
            self._take_back()
            for start, end in self._free:
                visit(start, end)

    def _act_on_notes(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            start, nbytes = self._returned.popleft()
            self._free.give(start, nbytes)
            self._in_use -= nbytes
