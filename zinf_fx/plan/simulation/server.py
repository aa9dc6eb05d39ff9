"""Serve the jobs of one resource in a simulation."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zinf_fx.plan.simulation.event_graph import Job


class Server:
    """A server does the jobs of one resource, in the order in which they become ready.

    It works at `depth` blocks of the first jobs at a time, and jobs share its rate by the blocks that they have under
    way. A job begins as soon as there is room for one of its blocks; with a depth of 1, one job runs at a time. While n
    of `depth` > 1 blocks are under way, the rate is (n / depth) ** p of the full one, with p such that it is `alone`
    for n = 1.

    Attributes:
        next_end: the time in seconds at which the next block ends, which may end its job or change the rate of all
            jobs; infinite while no block is under way.
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
        """Return the share of its speed that compute loses to the jobs under way, at the server's speed."""
        return sum(self._jobs[index].load * progress.rate for index, progress in self._under_way.items()) / self._speed

    def put(self, index: int, now: float) -> None:
        """Queue a job that has become ready."""
        heapq.heappush(self._waiting, (now, index))

    def start(self, now: float) -> list[tuple[int, int | None]]:
        """Begin the jobs that there is room for. Returns their indices, each with the index of the job that made room
        for it; None: the job did not have to wait."""
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
        """End the blocks that end now. Returns the indices of the jobs that are done."""
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
    """The progress of a job that is under way.

    Attributes:
        blocks: how many blocks are not done.
        seconds: the work that is left, in seconds at the full rate.
        per_block: the work of each block, in seconds at the full rate.
        together: how many of the blocks are under way.
        rate: how many seconds of work are done in a second.
        end: when the next block ends at that rate.
    """

    blocks: int
    seconds: float
    per_block: float
    together: int = 0
    rate: float = 0.0
    end: float = math.inf
