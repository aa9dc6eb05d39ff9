"""What a resource of a simulation works at, and what waits for it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from zinf_fx.plan.simulation.event_graph import Job


class Server:
    """Does the jobs of one resource, in the order in which they become ready.

    It works at `depth` blocks at a time: those of the first jobs, which share its speed by the blocks that each has
    under way. A job that doesn't fit begins when another one ends. With a depth of 1 that is one job at a time. While
    one block of several is under way, it has the share `alone` of its speed; with `depth` all of it; and with as many
    as lie in between, a power of their number.

    Attributes:
        next_end: seconds at which the next job ends; infinite while there is none.
    """

    def __init__(self, jobs: Sequence[Job], depth: int = 1, alone: float = 1.0) -> None:
        self._jobs, self._depth, self._alone = jobs, depth, alone
        self._waiting: list[tuple[float, int]] = []  # when it became ready, and its index
        # By job that is under way: seconds of work that are left at full speed, how many of them a second does, and
        # when the job ends at that pace.
        self._left: dict[int, float] = {}
        self._paces: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._speed, self._since = 1.0, 0.0
        self._changed = False
        self._last: tuple[int, float] | None = None  # what ended last, and when
        self.next_end = math.inf

    @property
    def load(self) -> float:
        """The share of its speed that computing loses by the jobs under way."""
        return sum(self._jobs[index].load * pace for index, pace in self._paces.items())

    @property
    def works(self) -> bool:
        """Whether jobs are under way."""
        return bool(self._left)

    def put(self, index: int, now: float) -> None:
        """A job that has become ready."""
        heapq.heappush(self._waiting, (now, index))

    def start(self, now: float) -> list[tuple[int, int | None]]:
        """Begin what there is room for: indices, each with that of the job that it had to wait for here, if any."""
        room = self._depth - sum(map(self._blocks, self._left)) if self._waiting else 0
        started: list[tuple[int, int | None]] = []
        while self._waiting and room > 0:
            ready, index = self._waiting[0]
            before = None
            if ready != now:
                if self._last is None or self._last[1] != now:
                    break
                before = self._last[0]
            heapq.heappop(self._waiting)
            self._left[index], self._paces[index] = self._jobs[index].seconds, 0.0
            room -= self._blocks(index)
            started.append((index, before))
        self._changed = self._changed or bool(started)
        return started

    def go_on(self, now: float, speed: float = 1.0) -> None:
        """From now on, work at this share of its speed."""
        if not self._changed and speed == self._speed:
            return
        for index, pace in self._paces.items():
            self._left[index] = max(self._left[index] - pace * (now - self._since), 0.0)
        self._since, self._speed, self._changed = now, speed, False
        room, blocks = self._depth, {}
        for index in self._left:
            blocks[index] = min(self._blocks(index), room)
            room -= blocks[index]
        under_way = self._depth - room
        if under_way and self._depth > 1:
            speed *= self._alone ** (1 - math.log(under_way, self._depth))
        for index, count in blocks.items():
            self._paces[index] = pace = speed * count / under_way
            self._ends[index] = now + self._left[index] / pace if pace else math.inf
        self.next_end = min(self._ends.values(), default=math.inf)

    def end(self, now: float) -> list[int]:
        """The jobs that end now, by their indices."""
        done = [index for index, end in self._ends.items() if end == now]
        for index in done:
            del self._left[index], self._paces[index], self._ends[index]
        if done:
            self._last, self._changed = (done[-1], now), True
            self.next_end = min(self._ends.values(), default=math.inf)
        return done

    def _blocks(self, index: int) -> int:
        """How many of a job's blocks are not moved yet."""
        job = self._jobs[index]
        return max(1, math.ceil(job.blocks * self._left[index] / job.seconds)) if job.seconds else 1
