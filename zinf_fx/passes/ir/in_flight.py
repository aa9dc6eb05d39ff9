"""Bytes in flight: what a graph's transfers hold in memory while each operator computes.

[Note: bytes in flight]
A tile is in flight from the operator that fetches it to the one that releases it, both included; what is fetched
for the backward graph, to the end of the forward graph. A tile that stays in memory between two uses is in flight from
the one to the other. A gradient is in flight from its reduce-scatter to its offload.
Tiles and gradients that live on the device are where they belong, and not in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import fx

from zinf_fx.passes.ir.framework import GraphContext, event_of, events_in, operator_of
from zinf_fx.plan.intervals import merged, sums
from zinf_fx.plan.lifetimes import Lifetimes
from zinf_fx.plan.schedule import PROLOGUE, GraphSchedule, Operator, Tile


class InFlight(NamedTuple):
    """A tile or its gradient in flight: from operator `first` to operator `last`, both included."""

    what: str
    nbytes: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.what} ({self.nbytes} bytes)"


def tile_bytes(tile: Tile) -> int:
    """Bytes that the tile takes while it is in flight."""
    return tile.gathered_nbytes if tile.needs_buffer else 0


def gradient_bytes(tile: Tile) -> int:
    """Bytes that the tile's gradient takes while it is in flight."""
    return 0 if tile.gradient_tier == "device" else tile.nbytes


def operators_in(graph: fx.Graph) -> int:
    """How many operators a graph has."""
    return 1 + max((operator_of(n) for n in graph.nodes if n.op not in ("placeholder", "output")), default=PROLOGUE)


def outline(graph: fx.Graph, context: GraphContext) -> GraphSchedule:
    """The schedule of a lowered graph, without what its operators compute."""
    operators = tuple(Operator(number, "", 0) for number in range(operators_in(graph)))
    return GraphSchedule(context.planned_kind, context.table, operators, tuple(map(event_of, events_in(graph))))


def spans(graph: fx.Graph, context: GraphContext) -> list[InFlight]:
    """Everything that is in flight in a lowered graph. A tile in several live ranges at once is counted once."""
    lifetimes, last = Lifetimes([outline(graph, context)]), operators_in(graph) - 1
    there: defaultdict[int, list[range]] = defaultdict(list)
    for presence in lifetimes.presences(0):
        there[presence.tile].append(presence.operators)
    for number in context.staying:
        there[number].append(range(PROLOGUE, last + 1))
    in_flight = []
    for number, operators in there.items():
        tile = context.table[number]
        for part in merged(operators):
            in_flight.append(InFlight(f"tile '{tile.label}'", tile_bytes(tile), part.start, part.stop - 1))
    for number, reduced, offloaded in lifetimes.gradient_offloads:
        tile = context.table[number]
        until = offloaded.operator if offloaded is not None else last
        in_flight.append(InFlight(f"gradient of '{tile.label}'", gradient_bytes(tile), reduced.operator, until))
    return [span for span in in_flight if span.nbytes]


class Ledger:
    """Bytes in flight per operator, the prologue included, against a budget (None: no limit)."""

    def __init__(self, entries: Iterable[InFlight], operators: int, budget: int | None) -> None:
        self.entries = list(entries)
        self.budget = budget
        everywhere = range(PROLOGUE, operators)
        live = sums([(range(entry.first, entry.last + 1), entry.nbytes) for entry in self.entries], everywhere)
        self._live = dict(zip(everywhere, live, strict=True))

    def over_budget(self) -> int | None:
        """The first operator with more bytes in flight than the budget."""
        if self.budget is None:
            return None
        return next((operator for operator, live in self._live.items() if live > self.budget), None)

    def fullest(self) -> int:
        """The operator with the most bytes in flight, the first of several."""
        return max(self._live, key=self._live.__getitem__)

    def at(self, operator: int) -> int:
        """Bytes in flight in one operator."""
        return self._live[operator]

    def largest(self, operator: int, count: int = 3) -> list[InFlight]:
        """The largest entries that are in flight in one operator."""
        held = [entry for entry in self.entries if entry.first <= operator <= entry.last]
        return sorted(held, key=lambda entry: -entry.nbytes)[:count]

    def extend(self, nbytes: int, end: int, wanted: int, held: Collection[int] = ()) -> int:
        """Stretch something that is in flight at operator `end` towards `wanted`, as far as there is room.

        In operators of `held` it is in flight anyway, and takes none. Returns where it then begins or ends.
        """
        if self.budget is None:
            return wanted
        step = 1 if wanted > end else -1
        while end != wanted and (end + step in held or self.take(nbytes, end + step)):
            end += step
        return end

    def take(self, nbytes: int, operator: int) -> bool:
        """Whether so many bytes more are in flight in one operator from now on: not if the budget has no room."""
        if self.budget is not None and self._live[operator] + nbytes > self.budget:
            return False
        self._live[operator] += nbytes
        return True
