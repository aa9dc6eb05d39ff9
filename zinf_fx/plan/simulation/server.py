"""What a resource of a simulation works at, and what waits for it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zinf_fx.plan.simulation.event_graph import Job


class Server:
    """Does the jobs of one resource, in the order in which they become ready.

    It works at `depth` blocks at a time: those of the first jobs, which share its rate by the blocks that each has
    under way. A job begins as soon as there is room for one of its blocks. With a depth of 1 that is one job at a time.
    While n of `depth` > 1 blocks are under way, the rate is (n / depth) ** p of the full one, with p such that it is
    `alone` for n = 1.

    Attributes:
        next_end: seconds at which the next block ends, with which its job or the rate of all may change; infinite while
            there is none.
    """

    def __init__(self, jobs: Sequence[Job], depth: int = 1, alone: float = 1.0) -> None:
        self._jobs, self._depth = jobs, depth
        self._power = -math.log(alone) / math.log(depth) if depth > 1 else 0.0
        self._waiting: list[tuple[float, int]] = []  # when it became ready, and its index
        self._under_way: dict[int, _Progress] = {}
        self._speed, self._since = 1.0, 0.0
        self._changed = False
        self._last: int | None = None  # the job whose block ended last
        self.next_end = math.inf

    @property
    def busy(self) -> bool:
        """Whether jobs are under way."""
        return bool(self._under_way)

    @property
    def load(self) -> float:
        """The share of its speed that computing loses by the jobs under way, which take it at the server's speed."""
        return sum(self._jobs[index].load * progress.rate for index, progress in self._under_way.items()) / self._speed

    def put(self, index: int, now: float) -> None:
        """A job that has become ready."""
        heapq.heappush(self._waiting, (now, index))

    def start(self, now: float) -> list[tuple[int, int | None]]:
        """Begin what there is room for: indices, each with that of the job that made room for it, if it had to wait."""
        started: list[tuple[int, int | None]] = []
        room = self._depth - sum(progress.blocks for progress in self._under_way.values()) if self._waiting else 0
        while self._waiting and room > 0:
            ready, index = heapq.heappop(self._waiting)
            job = self._jobs[index]
            blocks = job.blocks if self._depth > 1 else 1
            self._under_way[index] = _Progress(blocks, job.seconds, job.seconds / blocks)
            room -= blocks
            started.append((index, None if ready == now else self._last))
        self._changed = self._changed or bool(started)
        return started

    def go_on(self, now: float, speed: float = 1.0) -> None:
        """Work at this share of its rate from now on."""
        if not self._changed and speed == self._speed:
            return
        room = self._depth
        for progress in self._under_way.values():
            progress.seconds -= progress.rate * (now - self._since)
            progress.together = min(progress.blocks, room)
            room -= progress.together
        self._since, self._speed, self._changed = now, speed, False
        under_way = self._depth - room
        for progress in self._under_way.values():
            progress.rate = speed * (under_way / self._depth) ** self._power * progress.together / under_way
            left = max(progress.seconds - progress.per_block * (progress.together - 1), 0.0)
            progress.end = now + left / progress.rate if progress.rate else math.inf
        self.next_end = min((progress.end for progress in self._under_way.values()), default=math.inf)

    def end(self, now: float) -> list[int]:
        """End the blocks that end now: the jobs that are done, by their indices."""
        done = []
        for index, progress in [*self._under_way.items()]:
            if progress.end == now:
                self._last, self._changed = index, True
                progress.blocks = progress.together - 1
                if not progress.blocks:
                    del self._under_way[index]
                    done.append(index)
        return done


@dataclass
class _Progress:
    """A job that is under way.

    Attributes:
        blocks: those that are not done; `together` of them are under way.
        seconds: of work that is left, at the full rate; `per_block`: of each block.
        rate: how many of these seconds pass in one.
        end: when the next block ends at that rate.
    """

    blocks: int
    seconds: float
    per_block: float
    together: int = 0
    rate: float = 0.0
    end: float = math.inf
