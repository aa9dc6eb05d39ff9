"""Free intervals of a linear space: an arena's memory, a file's blocks."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator


def round_up(nbytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment


class FreeList:
    """Disjoint free intervals [start, end), sorted, never touching each other."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The free intervals as pairs (start, end), lowest first."""
        return iter(list(zip(self._starts, self._ends, strict=True)))

    @property
    def nbytes(self) -> int:
        """Bytes that are free."""
        return sum(self._ends) - sum(self._starts)

    @property
    def largest(self) -> int:
        """Bytes of the largest free interval."""
        return max((end - start for start, end in self), default=0)

    def take(self, nbytes: int, alignment: int, within: range | None = None) -> int | None:
        """The start of `nbytes` bytes, aligned, out of the smallest interval that holds them; the lowest of equals.

        `within`: where they are to lie; default anywhere. None if no interval has room for them.
        """
        found = self._find(nbytes, alignment, within)
        if found is None:
            return None
        index, aligned = found
        start, end = self._starts.pop(index), self._ends.pop(index)
        for piece in ((aligned + nbytes, end), (start, aligned)):
            if piece[0] < piece[1]:
                self._starts.insert(index, piece[0])
                self._ends.insert(index, piece[1])
        return aligned

    def _find(self, nbytes: int, alignment: int, within: range | None) -> tuple[int, int] | None:
        """Which interval `take` takes from, and where."""
        first, last = 0, len(self._starts)
        if within is not None:
            first = max(bisect_right(self._starts, within.start) - 1, 0)
            last = bisect_left(self._starts, within.stop)
        best: tuple[int, int, int] | None = None
        for index in range(first, last):
            start, end = self._starts[index], self._ends[index]
            if within is not None:
                start, end = max(start, within.start), min(end, within.stop)
            aligned = round_up(start, alignment)
            if aligned + nbytes <= end and (best is None or end - start < best[0]):
                best = (end - start, index, aligned)
        return best and best[1:]

    def discard(self, start: int, end: int) -> None:
        """Makes [start, end) not free, whatever of it is."""
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._starts) and self._starts[index] < end:
            if self._ends[index] <= start:
                index += 1
                continue
            first, last = self._starts.pop(index), self._ends.pop(index)
            for piece in ((end, last), (first, start)):
                if piece[0] < piece[1]:
                    self._starts.insert(index, piece[0])
                    self._ends.insert(index, piece[1])
            if first < start:
                index += 1

    def copy(self) -> FreeList:
        """The same intervals."""
        twin = FreeList()
        twin._starts, twin._ends = list(self._starts), list(self._ends)
        return twin

    def give(self, start: int, nbytes: int) -> None:
        """Makes [start, start + nbytes) free. It must not be free yet, not in part either."""
        if not nbytes:
            return
        end = start + nbytes
        index = bisect_left(self._starts, start)
        before, after = index - 1, index
        assert before < 0 or self._ends[before] <= start, f"[{start}, {end}) overlaps a free interval below it"
        assert after == len(self._starts) or end <= self._starts[after], (
            f"[{start}, {end}) overlaps a free interval above it"
        )
        joins_after = after < len(self._starts) and self._starts[after] == end
        joins_before = before >= 0 and self._ends[before] == start
        if joins_after:
            end = self._ends[after]
            del self._starts[after], self._ends[after]
        if joins_before:
            self._ends[before] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    def free_before(self, end: int) -> int:
        """Bytes of the free interval that ends at `end`; 0 if none does."""
        return end - self._starts[-1] if self._ends and self._ends[-1] == end else 0


class Space:
    """A free list that threads share, and that knows how much is taken.

    [Note: giving back in the garbage collector]  What is leased from a space often goes back in a finalizer, and the
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
            self._untouched = self._free.copy()

    def take(self, nbytes: int, alignment: int, within: range | None = None) -> int | None:
        """As `FreeList.take`."""
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
        """As `FreeList.free_before`."""
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
