"""What the events of a schedule mean. This is the only module that interprets them.

[Note: lifetimes]
A tile's lifetime in a step is a sequence of live ranges. A live range begins with a fetch, goes on with an upload, an
all-gather and a wait, and ends with a release. Three things join live ranges:

- The boundary between forward and backward: the forward graph may start the transfers with which a live range of the
  backward graph begins (`LiveRange.prefetched`). The backward graph's own events for these transfers, in its prologue,
  then find them under way.
- A tile that is held: two live ranges may overlap, because forward fetches for backward a tile that it has in memory
  for itself. The later one finds it there, and the memory is free when both have ended.
- A tile that is kept: a release may leave the tile in memory, where the next live range finds it, in the same graph, in
  the next one, or in the next step.

A gradient leaves the device with a reduce-scatter, then an offload.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from zinf_fx.errors import PlanError
from zinf_fx.plan.schedule import PROLOGUE, Event, EventKind, GraphSchedule

TRANSFERS: tuple[EventKind, ...] = ("fetch", "upload", "allgather")
STEPS: tuple[EventKind, ...] = (*TRANSFERS, "wait", "release")

# How the fetch of a live range finds its tile: not in memory, kept there since the one before, or held by another.
Found = Literal["away", "kept", "held"]


class At(NamedTuple):
    """Where an event stands: the number of its graph in the step, its own number there, and its operator."""

    graph: int
    number: int
    operator: int


@dataclass(frozen=True, eq=False)
class LiveRange:
    """One of the times that a tile is in memory. See [Note: lifetimes].

    Attributes:
        tile: index of the tile.
        graph: number of the graph that uses it.
        number: how many live ranges of the tile in that graph come before.
        steps: where the graph's own events for it stand, by kind.
        prefetched: where the transfers stand that the graph before starts for it, by kind.
        found: how the first fetch finds the tile.
        kept: whether the tile stays in memory after the release, until its next fetch.
    """

    tile: int
    graph: int
    number: int
    steps: dict[EventKind, At]
    prefetched: Mapping[EventKind, At]
    found: Found
    kept: bool

    @property
    def fetch(self) -> At:
        """The graph's own fetch."""
        return self.steps["fetch"]

    @property
    def begin(self) -> At:
        """Where the live range begins."""
        return self.prefetched.get("fetch", self.fetch)

    @property
    def release(self) -> At:
        """Where the live range ends."""
        return self.steps["release"]

    def moves(self, kind: EventKind) -> bool:
        """Whether a transfer of this kind has bytes to move. What is held is uploaded again, in case it changed."""
        return self.found == "away" or (self.found == "held" and kind == "upload")

    def is_under_way(self, kind: EventKind, graph: int) -> bool:
        """Whether a transfer of this kind has been started before a graph has an event for it."""
        return graph == self.graph and kind in self.prefetched

    def events(self, kind: EventKind) -> Iterator[At]:
        """Where the events of one kind stand: that of the graph before, and the graph's own."""
        for at in (self.prefetched.get(kind), self.steps.get(kind)):
            if at is not None:
                yield at


class GradientOffload(NamedTuple):
    """Where a gradient is reduced, and where it is offloaded, if it is."""

    tile: int
    reduced: At
    offloaded: At | None


class Reuse(NamedTuple):
    """Two consecutive live ranges of a tile; `next_step`: the later one belongs to the next step."""

    before: LiveRange
    after: LiveRange
    next_step: bool

    def spans(self, graph: int) -> bool:
        """Whether a graph begins after the first live range and not after the second."""
        if self.next_step:
            return graph > self.before.graph or graph <= self.after.graph
        return self.before.graph < graph <= self.after.graph


class Presence(NamedTuple):
    """Operators throughout which a tile is in memory, and the one from which on it is on the device."""

    tile: int
    operators: range
    uploaded: int


class Lifetimes:
    """The lifetimes of all tiles, and the offloads of all gradients, in the graphs of a step.

    Attributes:
        of_tile: by index, the live ranges of each tile, in the order in which they end.
        gradient_offloads: of all gradients, in the order of their reduce-scatters.
        unclaimed: by tile, the transfers for backward that no graph here goes on with.
    """

    def __init__(self, graphs: Sequence[GraphSchedule]) -> None:
        """Raises: OutOfOrder for an event that doesn't follow what comes before it; UnfinishedLifetime for a graph that
        ends while a tile is in memory."""
        self.of_tile: dict[int, list[LiveRange]] = {}
        self.gradient_offloads: list[GradientOffload] = []
        self.unclaimed: dict[int, dict[EventKind, At]] = {}
        self._counts = [len(graph.operators) for graph in graphs]
        ahead: dict[int, dict[EventKind, At]] = {}
        held: Collection[int] = ()
        for number, graph in enumerate(graphs):
            reader = _Reader(number, graph, ahead, held)
            reader.read(self.of_tile, self.gradient_offloads)
            self.unclaimed |= reader.started
            ahead, held = reader.ahead, reader.held
        self.unclaimed |= ahead

    def __iter__(self) -> Iterator[LiveRange]:
        return (live_range for live_ranges in self.of_tile.values() for live_range in live_ranges)

    def live_range_of(self, graph: int, number: int) -> LiveRange | None:
        """The live range that the event at this place belongs to; None: it is a gradient's, or nothing here goes on
        with the transfer."""
        return self._live_ranges.get((graph, number))

    def frees(self, live_range: LiveRange) -> bool:
        """Whether the tile's memory is free after the live range: the tile is not kept, and no other one holds it."""
        unclaimed = self.unclaimed.get(live_range.tile)
        if live_range.kept or (unclaimed is not None and unclaimed["fetch"] < live_range.release):
            return False
        begun_early = self._begun_early.get(live_range.tile, ())
        return not any(
            early.begin < live_range.release < early.release for early in begun_early if early is not live_range
        )

    def reuses(self, tile: int) -> Iterator[Reuse]:
        """The pairs of consecutive live ranges of a tile. The last is followed by the first, in the next step."""
        live_ranges = self.of_tile[tile]
        for before, after in pairwise(live_ranges):
            yield Reuse(before, after, False)
        yield Reuse(live_ranges[-1], live_ranges[0], True)

    def kept_at_begin(self, graph: int) -> frozenset[int]:
        """The tiles that are in memory when a graph begins because they were kept; from the second step on."""
        pairs = (pair for tile in self.of_tile for pair in self.reuses(tile))
        return frozenset(pair.before.tile for pair in pairs if pair.before.kept and pair.spans(graph))

    def is_always_kept(self, tile: int) -> bool:
        """Whether the tile stays in memory from step to step, and is moved once."""
        return all(live_range.kept and live_range.found == "kept" for live_range in self.of_tile[tile])

    def presences(self, graph: int) -> Iterator[Presence]:
        """When the tiles are in memory while a graph runs. Of one tile, these may overlap.

        A live range lasts from its first fetch to its release, both included; what is fetched for backward, to the end
        of the graph; what is kept, from the operator after its release, or from the prologue, to its next fetch, or
        to the end.
        """
        end = self._counts[graph]
        for live_range in self:
            if live_range.graph == graph:
                operators = range(live_range.fetch.operator, live_range.release.operator + 1)
                uploaded = operators.start if live_range.found == "kept" else live_range.steps["upload"].operator
                yield Presence(live_range.tile, operators, uploaded)
            elif live_range.prefetched and live_range.begin.graph == graph:
                yield self._ahead(live_range.tile, live_range.prefetched, live_range.found == "held", end)
        for tile, ahead in self.unclaimed.items():
            if ahead["fetch"].graph == graph:
                yield self._ahead(tile, ahead, False, end)
        for tile in self.of_tile:
            for pair in self.reuses(tile):
                for operators in _apart(pair, graph, end):
                    yield Presence(tile, operators, operators.start)

    @staticmethod
    def _ahead(tile: int, ahead: Mapping[EventKind, At], held: bool, end: int) -> Presence:
        """The presence of what is fetched for backward, until the graph ends."""
        start = ahead["fetch"].operator
        uploaded = start if held else ahead["upload"].operator if "upload" in ahead else end
        return Presence(tile, range(start, end), uploaded)

    @cached_property
    def _begun_early(self) -> dict[int, list[LiveRange]]:
        """The live ranges that begin in the graph before, by tile: no others overlap with one."""
        begun_early: defaultdict[int, list[LiveRange]] = defaultdict(list)
        for live_range in self:
            if live_range.prefetched:
                begun_early[live_range.tile].append(live_range)
        return dict(begun_early)

    @cached_property
    def _live_ranges(self) -> dict[tuple[int, int], LiveRange]:
        return {
            at[:2]: live_range
            for live_range in self
            for at in (*live_range.prefetched.values(), *live_range.steps.values())
        }


def _apart(pair: Reuse, graph: int, end: int) -> Iterator[range]:
    """The operators of a graph that lie between two live ranges of a tile that is kept; `end`: the number after its
    last."""
    before, after, next_step = pair
    start, stop = before.release.operator + 1, after.fetch.operator
    if before.graph == graph == after.graph and not next_step:
        if before.kept:
            yield range(start, stop)
        return
    if before.graph == graph and before.kept:
        yield range(start, end)
    if after.graph == graph and after.found == "kept":
        yield range(PROLOGUE, stop)
    if graph not in (before.graph, after.graph) and before.kept and pair.spans(graph):
        yield range(PROLOGUE, end)


class OutOfOrder(PlanError):
    """An event doesn't follow what comes before it.

    Attributes:
        graph: the event's.
        number: of the event, in its graph.
    """

    def __init__(self, graph: GraphSchedule, number: int, due: str) -> None:
        event = graph.events[number]
        label = graph.tiles[event.tile].label[:60]
        super().__init__(f"events[{number}] ({event.kind}) of '{label}' comes where {due} is due")
        self.graph, self.number = graph, number


class UnfinishedLifetime(PlanError):
    """A graph ends while a tile is in memory."""


class _Reader:
    """Reads the events of one graph.

    Attributes:
        started: by tile, the transfers that the graph before started for this one, until it goes on with them.
        ahead: those that this graph starts for the next one.
        held: of these tiles, those that this graph has in memory for itself when it starts them.
    """

    def __init__(
        self, graph: int, schedule: GraphSchedule, started: Mapping[int, dict[EventKind, At]], held: Collection[int]
    ) -> None:
        """`held`: the same of the graph before."""
        self._graph, self._schedule = graph, schedule
        self.started, self._held_before = dict(started), held
        self.ahead: dict[int, dict[EventKind, At]] = {}
        self.held: set[int] = set()
        self._begun: dict[int, LiveRange] = {}  # by tile, the live range that isn't over
        self._counts: Counter[int] = Counter()
        self._reduced: defaultdict[int, deque[int]] = defaultdict(deque)  # by tile, those that are not offloaded

    def read(self, of_tile: dict[int, list[LiveRange]], gradient_offloads: list[GradientOffload]) -> None:
        """Add the live ranges and gradient offloads of the graph. Raises: OutOfOrder, UnfinishedLifetime."""
        for number, event in enumerate(self._schedule.events):
            at = At(self._graph, number, event.operator)
            if event.kind == "reduce_scatter":
                self._reduced[event.tile].append(len(gradient_offloads))
                gradient_offloads.append(GradientOffload(event.tile, at, None))
            elif event.kind == "offload":
                if not self._reduced[event.tile]:
                    raise OutOfOrder(self._schedule, number, "reduce_scatter")
                which = self._reduced[event.tile].popleft()
                gradient_offloads[which] = gradient_offloads[which]._replace(offloaded=at)
            elif event.for_backward:
                self._transfer_ahead(at, event)
            elif event.kind in STEPS and (live_range := self._step(at, event)) is not None:
                of_tile.setdefault(live_range.tile, []).append(live_range)
        for tile, begun in self._begun.items():
            label = self._schedule.tiles[tile].label[:60]
            raise UnfinishedLifetime(f"the lifetime of '{label}' ends before its {STEPS[len(begun.steps)]}")

    def _transfer_ahead(self, at: At, event: Event) -> None:
        ahead = self.ahead.setdefault(event.tile, {})
        self._check_due(at, event, ahead, TRANSFERS)
        if event.kind == "fetch" and event.tile in self._begun:
            self.held.add(event.tile)
        ahead[event.kind] = at

    def _step(self, at: At, event: Event) -> LiveRange | None:
        """The live range, if the event ends it."""
        tile = event.tile
        self._check_due(at, event, self._begun[tile].steps if tile in self._begun else {}, STEPS)
        if event.kind == "fetch":
            ahead = self.started.pop(tile, {})
            holds = tile in self._held_before if ahead else tile in self.ahead
            finds: Found = "kept" if event.resident else "held" if holds else "away"
            self._begun[tile] = LiveRange(tile, self._graph, self._counts[tile], {}, ahead, finds, kept=False)
            self._counts[tile] += 1
        self._begun[tile].steps[event.kind] = at
        return replace(self._begun.pop(tile), kept=event.resident) if event.kind == "release" else None

    def _check_due(self, at: At, event: Event, done: Collection[EventKind], steps: Sequence[EventKind]) -> None:
        due = steps[len(done)] if len(done) < len(steps) else "nothing more for backward"
        if event.kind != due:
            raise OutOfOrder(self._schedule, at.number, due)
