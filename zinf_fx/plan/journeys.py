"""What the events of a schedule mean. This is the only module that interprets them.

[Note: journeys]
A tile's journey is the sequence of its stays in memory during a step. A stay begins with a fetch, goes on with an
upload, an all-gather and a wait, and ends with a release. Three things join stays:

- The turn: the forward graph may start the transfers with which a stay of the backward graph begins (`Stay.ahead`).
  The backward graph's own events for these transfers, at its head, then find them under way.
- A tile that is held: two stays may overlap, because the turn fetches a tile that the forward graph has in memory for
  itself. The later one finds it there, and the memory is free when both have ended.
- A tile that is kept: a release may leave the tile in memory, where the next stay finds it, in the same graph, in the
  next one, or in the next step.

A gradient's journey is a departure: a reduce-scatter, then an offload.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from zinf_fx.errors import PlanError
from zinf_fx.plan.schedule import HEAD, Event, EventKind, GraphSchedule

TRANSFERS: tuple[EventKind, ...] = ("fetch", "upload", "allgather")
STEPS: tuple[EventKind, ...] = (*TRANSFERS, "wait", "release")

# How the fetch of a stay finds its tile: not in memory, kept there since the stay before, or held by another stay.
Found = Literal["away", "kept", "held"]


class At(NamedTuple):
    """Where an event stands: the number of its graph in the step, its own number there, and its operator."""

    graph: int
    number: int
    operator: int


@dataclass(frozen=True, eq=False)
class Stay:
    """One of the times that a tile is in memory. See [Note: journeys].

    Attributes:
        tile: index of the tile.
        graph: number of the graph that uses it.
        number: how many stays of the tile in that graph come before.
        steps: where the graph's own events for it stand, by kind.
        ahead: where the transfers stand that the graph before starts for it, by kind.
        found: how the first fetch finds the tile.
        kept: whether the tile stays in memory after the release, until its next fetch.
    """

    tile: int
    graph: int
    number: int
    steps: dict[EventKind, At]
    ahead: Mapping[EventKind, At]
    found: Found
    kept: bool

    @property
    def fetch(self) -> At:
        """The graph's own fetch."""
        return self.steps["fetch"]

    @property
    def begin(self) -> At:
        """The first event of the stay."""
        return self.ahead.get("fetch", self.fetch)

    @property
    def release(self) -> At:
        """The last event of the stay."""
        return self.steps["release"]

    def moves(self, kind: EventKind) -> bool:
        """Whether a transfer of this kind has bytes to move. What is held is uploaded again, in case it changed."""
        return self.found == "away" or (self.found == "held" and kind == "upload")

    def is_under_way(self, kind: EventKind, graph: int) -> bool:
        """Whether a transfer of this kind has been started before a graph has an event for it."""
        return graph == self.graph and kind in self.ahead

    def events(self, kind: EventKind) -> Iterator[At]:
        """Where the events of one kind stand: that of the turn, and the graph's own."""
        for at in (self.ahead.get(kind), self.steps.get(kind)):
            if at is not None:
                yield at


class Departure(NamedTuple):
    """The way of a gradient out of the device: where it is reduced, and where it is offloaded, if it is."""

    tile: int
    reduced: At
    offloaded: At | None


class Between(NamedTuple):
    """Two consecutive stays of a tile; `next_step`: the later one belongs to the next step."""

    before: Stay
    after: Stay
    next_step: bool

    def spans(self, graph: int) -> bool:
        """Whether a graph begins after the first stay and not after the second."""
        if self.next_step:
            return graph > self.before.graph or graph <= self.after.graph
        return self.before.graph < graph <= self.after.graph


class Presence(NamedTuple):
    """Operators throughout which a tile is in memory, and the one from which on it is on the device."""

    tile: int
    operators: range
    uploaded: int


class Journeys:
    """The journeys of all tiles, and the departures of all gradients, in the graphs of a step.

    Attributes:
        of_tile: by index, the stays of each tile, in the order in which they end.
        departures: those of gradients, in the order of their reduce-scatters.
        unclaimed: by tile, the transfers of the turn that no graph here goes on with.
    """

    def __init__(self, graphs: Sequence[GraphSchedule]) -> None:
        """Raises: OutOfOrder for an event that doesn't follow what comes before it; UnfinishedJourney for a graph that
        ends while a tile is in memory."""
        self.of_tile: dict[int, list[Stay]] = {}
        self.departures: list[Departure] = []
        self.unclaimed: dict[int, dict[EventKind, At]] = {}
        self._counts = [len(graph.operators) for graph in graphs]
        ahead: dict[int, dict[EventKind, At]] = {}
        held: Collection[int] = ()
        for number, graph in enumerate(graphs):
            reader = _Reader(number, graph, ahead, held)
            reader.read(self.of_tile, self.departures)
            self.unclaimed |= reader.started
            ahead, held = reader.ahead, reader.held
        self.unclaimed |= ahead

    def __iter__(self) -> Iterator[Stay]:
        return (stay for stays in self.of_tile.values() for stay in stays)

    def stay_of(self, graph: int, number: int) -> Stay | None:
        """The stay that the event at this place belongs to; None: it is a gradient's, or nothing here goes on with the
        transfer."""
        return self._stays.get((graph, number))

    def frees(self, stay: Stay) -> bool:
        """Whether the tile's memory is free after the stay: the tile is not kept, and no other stay holds it."""
        turn = self.unclaimed.get(stay.tile)
        if stay.kept or (turn is not None and turn["fetch"] < stay.release):
            return False
        others = self._begun_ahead.get(stay.tile, ())
        return not any(other.begin < stay.release < other.release for other in others if other is not stay)

    def between(self, tile: int) -> Iterator[Between]:
        """The pairs of consecutive stays of a tile. The last is followed by the first, in the next step."""
        stays = self.of_tile[tile]
        for one, other in pairwise(stays):
            yield Between(one, other, False)
        yield Between(stays[-1], stays[0], True)

    def kept_at_begin(self, graph: int) -> frozenset[int]:
        """The tiles that are in memory when a graph begins because they were kept; from the second step on."""
        pairs = (pair for tile in self.of_tile for pair in self.between(tile))
        return frozenset(pair.before.tile for pair in pairs if pair.before.kept and pair.spans(graph))

    def is_always_kept(self, tile: int) -> bool:
        """Whether the tile stays in memory from step to step, and is moved once."""
        return all(stay.kept and stay.found == "kept" for stay in self.of_tile[tile])

    def presences(self, graph: int) -> Iterator[Presence]:
        """When the tiles are in memory while a graph runs. Of one tile, these may overlap.

        A stay lasts from its first fetch to its release, both included; what the turn fetches, to the end of the graph;
        what is kept, from the operator behind its release, or from the head, to its next fetch, or to the end.
        """
        end = self._counts[graph]
        for stay in self:
            if stay.graph == graph:
                operators = range(stay.fetch.operator, stay.release.operator + 1)
                uploaded = operators.start if stay.found == "kept" else stay.steps["upload"].operator
                yield Presence(stay.tile, operators, uploaded)
            elif stay.ahead and stay.begin.graph == graph:
                yield self._ahead(stay.tile, stay.ahead, stay.found == "held", end)
        for tile, ahead in self.unclaimed.items():
            if ahead["fetch"].graph == graph:
                yield self._ahead(tile, ahead, False, end)
        for tile in self.of_tile:
            for pair in self.between(tile):
                for operators in _apart(pair, graph, end):
                    yield Presence(tile, operators, operators.start)

    @staticmethod
    def _ahead(tile: int, ahead: Mapping[EventKind, At], held: bool, end: int) -> Presence:
        """Of what the turn fetches, until the graph ends."""
        start = ahead["fetch"].operator
        uploaded = start if held else ahead["upload"].operator if "upload" in ahead else end
        return Presence(tile, range(start, end), uploaded)

    @cached_property
    def _begun_ahead(self) -> dict[int, list[Stay]]:
        """By tile, the stays that the turn begins: no others overlap with one."""
        found: defaultdict[int, list[Stay]] = defaultdict(list)
        for stay in self:
            if stay.ahead:
                found[stay.tile].append(stay)
        return dict(found)

    @cached_property
    def _stays(self) -> dict[tuple[int, int], Stay]:
        return {at[:2]: stay for stay in self for at in (*stay.ahead.values(), *stay.steps.values())}


def _apart(pair: Between, graph: int, end: int) -> Iterator[range]:
    """The operators of a graph that lie between two stays of a tile that is kept; `end`: the number behind its last."""
    before, after, next_step = pair
    start, stop = before.release.operator + 1, after.fetch.operator
    if before.graph == graph == after.graph and not next_step:
        if before.kept:
            yield range(start, stop)
        return
    if before.graph == graph and before.kept:
        yield range(start, end)
    if after.graph == graph and after.found == "kept":
        yield range(HEAD, stop)
    if graph not in (before.graph, after.graph) and before.kept and pair.spans(graph):
        yield range(HEAD, end)


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


class UnfinishedJourney(PlanError):
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
        self._begun: dict[int, Stay] = {}  # by tile, the stay that isn't over
        self._counts: Counter[int] = Counter()
        self._reduced: defaultdict[int, deque[int]] = defaultdict(deque)  # by tile, its open departures

    def read(self, of_tile: dict[int, list[Stay]], departures: list[Departure]) -> None:
        """Add the stays and departures of the graph. Raises: OutOfOrder, UnfinishedJourney."""
        for number, event in enumerate(self._schedule.events):
            at = At(self._graph, number, event.operator)
            if event.kind == "reduce_scatter":
                self._reduced[event.tile].append(len(departures))
                departures.append(Departure(event.tile, at, None))
            elif event.kind == "offload":
                if not self._reduced[event.tile]:
                    raise OutOfOrder(self._schedule, number, "reduce_scatter")
                which = self._reduced[event.tile].popleft()
                departures[which] = departures[which]._replace(offloaded=at)
            elif event.turn:
                self._transfer_ahead(at, event)
            elif event.kind in STEPS and (stay := self._step(at, event)) is not None:
                of_tile.setdefault(stay.tile, []).append(stay)
        for tile, begun in self._begun.items():
            label = self._schedule.tiles[tile].label[:60]
            raise UnfinishedJourney(f"the journey of '{label}' ends before its {STEPS[len(begun.steps)]}")

    def _transfer_ahead(self, at: At, event: Event) -> None:
        ahead = self.ahead.setdefault(event.tile, {})
        self._check_due(at, event, ahead, TRANSFERS)
        if event.kind == "fetch" and event.tile in self._begun:
            self.held.add(event.tile)
        ahead[event.kind] = at

    def _step(self, at: At, event: Event) -> Stay | None:
        """The stay, if the event ends it."""
        tile = event.tile
        self._check_due(at, event, self._begun[tile].steps if tile in self._begun else {}, STEPS)
        if event.kind == "fetch":
            ahead = self.started.pop(tile, {})
            holds = tile in self._held_before if ahead else tile in self.ahead
            found: Found = "kept" if event.resident else "held" if holds else "away"
            self._begun[tile] = Stay(tile, self._graph, self._counts[tile], {}, ahead, found, kept=False)
            self._counts[tile] += 1
        self._begun[tile].steps[event.kind] = at
        return replace(self._begun.pop(tile), kept=event.resident) if event.kind == "release" else None

    def _check_due(self, at: At, event: Event, done: Collection[EventKind], steps: Sequence[EventKind]) -> None:
        due = steps[len(done)] if len(done) < len(steps) else "nothing more of the turn"
        if event.kind != due:
            raise OutOfOrder(self._schedule, at.number, due)
