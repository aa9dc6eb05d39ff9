"""The buffers that a step's transfers need, and from which event to which each is needed.

A step repeats: forward, backward, the optimizer's step, and again forward. Its clock counts the events of its graphs,
one after the other, and then the two halves of the optimizer's step. A buffer may be needed around the end of the step:
that of a tile which stays in memory for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from zinf_fx.plan.intervals import sums
from zinf_fx.plan.lifetimes import At
from zinf_fx.plan.memory.accounting import bytes_read, gradient_buffer_bytes, in_blocks, prefetched_gradient_buffers
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import EventKind, Tile
from zinf_fx.sizes import blocks


@dataclass(frozen=True)
class PlannedBuffer:
    """One buffer.

    Attributes:
        spans: when it is needed, as ranges of the clock: one, or two around the end of a step.
        takers: the events at which it is taken, or found to be taken.
    """

    what: Literal["tile", "write", "chunks"]
    label: str
    nbytes: int
    spans: tuple[range, ...]
    takers: tuple[At, ...] = ()


@dataclass(frozen=True)
class Clock:
    """The times of a plan's events, and of the optimizer's step after them."""

    plan: Plan

    @cached_property
    def starts(self) -> list[int]:
        """When each graph begins and, last, when the optimizer's step does."""
        return [0, *accumulate(len(graph.events) for graph in self.plan.graphs)]

    def at(self, place: At) -> int:
        """When an event happens."""
        return self.starts[place.graph] + place.number

    @property
    def step(self) -> int:
        """The first half of the optimizer's step, while gradients may still be on their way to NVMe."""
        return self.starts[-1]

    @property
    def end(self) -> int:
        """After the second half, and when the next step begins."""
        return self.step + 2

    @property
    def always(self) -> range:
        """All the time."""
        return range(self.end)


def host_buffers(plan: Plan) -> list[PlannedBuffer]:
    """The buffers in host memory: of tiles that are read from NVMe, and of gradients that are written there.

    Where the device computes in host memory, a tile's is needed until its release, else until somebody waits for it:
    where the disk is late, its upload starts only then. A tile that stays on the device needs one for each fetch
    nevertheless: it is read again where it has changed.
    """
    closes: EventKind = "wait" if plan.has_own_memory else "release"
    return [*_tiles(plan, "fetch", closes, lambda tile: _in_host_memory(tile, plan.has_own_memory)), *_writes(plan)]


def device_buffers(plan: Plan) -> list[PlannedBuffer]:
    """The buffers in the memory of a device that has its own: of tiles that don't live there."""
    if not plan.has_own_memory:
        return []
    return list(_tiles(plan, "upload", "release", lambda t: blocks(t.gathered_nbytes) if t.needs_buffer else 0))


def _in_host_memory(tile: Tile, separate: bool) -> int:
    """Bytes of host memory that a fetched tile needs. Where that is the device's, shards are gathered in it."""
    if tile.partitioned and not separate:
        return blocks(tile.gathered_nbytes)
    return in_blocks(tile, tile.nbytes) if tile.owned and tile.tier == "nvme" else bytes_read(tile)


def _tiles(plan: Plan, opens: EventKind, closes: EventKind, size: Callable[[Tile], int]) -> Iterator[PlannedBuffer]:
    """The buffer of each tile is needed from the first event that opens it to the one after which nobody needs it.

    Buffers come in the order in which they are given back, those that never are, last.
    """
    clock, lifetimes = Clock(plan), plan.lifetimes
    given_back: list[tuple[At, PlannedBuffer]] = []
    always: list[tuple[At, PlannedBuffer]] = []
    for index, live_ranges in lifetimes.of_tile.items():
        tile = plan.tiles[index]
        if not (nbytes := size(tile)):
            continue
        marks = [(at, True) for live_range in live_ranges for at in live_range.events(opens)]
        marks += [(s.steps[closes], False) for s in live_ranges if closes != "release" or lifetimes.frees(s)]
        marks.sort(key=lambda mark: mark[0])
        last = max((number for number, (_, needed) in enumerate(marks) if not needed), default=-1)
        takers: list[At] = []
        for at, needed in (*marks[last + 1 :], *marks[: last + 1]):
            if needed:
                takers.append(at)
            elif takers:
                start, stop = clock.at(takers[0]), clock.at(at)
                spans = (range(start, stop),) if start < stop else (range(stop), range(start, clock.end))
                given_back.append((at, PlannedBuffer("tile", tile.label, nbytes, spans, tuple(takers))))
                takers = []
        if takers:
            always.append((takers[0], PlannedBuffer("tile", tile.label, nbytes, (clock.always,), tuple(takers))))
    for placed in (given_back, always):
        yield from (buffer for _, buffer in sorted(placed, key=lambda pair: pair[0]))


def _writes(plan: Plan) -> Iterator[PlannedBuffer]:
    """On their way to NVMe: activations, and what forward writes to parameters, each until its room is needed for
    another, or the graph's end; gradients, too, or the optimizer's chunks need it. For gradients, see
    `prefetched_gradient_buffers`."""
    clock = Clock(plan)
    for graph, schedule in enumerate(plan.graphs):
        after, left = deque(prefetched_gradient_buffers(plan, schedule)), []  # the times at which gradients left
        writing: deque[tuple[int, At, Tile, int]] = deque()  # with the time at which each has its room
        together = 0
        for number, event in enumerate(schedule.events):
            tile = schedule.tiles[event.tile]
            if event.kind == "offload" and tile.gradient_tier == "nvme":
                buffer, nbytes = plan.gradient_buffer, gradient_buffer_bytes(tile, plan.stage)
            elif event.kind in ("offload_activation", "write") and tile.tier == "nvme":
                buffer, nbytes = plan.activation_buffer, blocks(tile.held_nbytes)
            else:
                continue
            at = At(graph, number, event.operator)
            begin = clock.at(at)
            if event.kind == "offload":
                left.append(begin)
                begin = begin if (earlier := after.popleft()) is None else left[earlier] + 1
            while together > max(buffer - nbytes, 0):
                earliest = writing.popleft()
                together -= earliest[-1]
                yield _write(*earliest, begin)
            writing.append((begin, at, tile, nbytes))
            together += nbytes
        for write in writing:
            yield _write(*write, clock.step + 1 if schedule.kind == "backward" else clock.starts[graph + 1])


def _write(begin: int, at: At, tile: Tile, nbytes: int, stop: int) -> PlannedBuffer:
    return PlannedBuffer("write", tile.label, nbytes, (range(begin, stop),), (at,))


def profile(buffers: Collection[PlannedBuffer], end: int) -> list[int]:
    """Bytes that are needed at each time before `end`."""
    return sums([(span, buffer.nbytes) for buffer in buffers for span in buffer.spans], range(end))
