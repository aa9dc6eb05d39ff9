"""Bytes in flight: what a graph's transfers hold in memory while each operator computes.

[Note: bytes in flight]
A tile is in flight from the operator that fetches it to the one that releases it, both included; what the turn fetches
for the backward graph, to the end of the forward graph. A tile that stays in memory between two uses is in flight from
the one to the other. A gradient is in flight from its reduce-scatter to its offload.
Tiles and gradients that live on the device are where they belong, and not in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.framework import GraphContext, Stay, TileKey, key_of, nodes_calling, operator_of, stays_of
from zinf_fx.plan.schedule import HEAD, Tile


@dataclass(frozen=True)
class Span:
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
    return 1 + max((operator_of(n) for n in graph.nodes if n.op not in ("placeholder", "output")), default=HEAD)


def spans(graph: fx.Graph, context: GraphContext) -> list[Span]:
    """Everything that is in flight in a lowered graph. A tile that the turn fetches again is counted once."""
    moved = (ops.fetch, ops.release, ops.reduce_scatter, ops.offload)
    where: dict[tuple[Stay, object], int] = {}
    for stay, node in stays_of(nodes_calling(graph, *moved)):
        where[stay, "turn" if node.kwargs.get("turn") else node.target] = operator_of(node)
    last = operators_in(graph) - 1
    own = held_by(graph)
    found = []
    for (stay, kind), first in where.items():
        tile = context.tile(stay.key)
        of_tile = (f"tile '{tile.label}'", tile_bytes(tile))
        if kind is ops.fetch:
            found.append(Span(*of_tile, first, where[stay, ops.release]))
        elif kind == "turn":
            found += [Span(*of_tile, *part) for part in _without(first, last, own.get(stay.key, ()))]
        elif kind is ops.reduce_scatter:
            until = where.get((stay, ops.offload), last)
            found.append(Span(f"gradient of '{tile.label}'", gradient_bytes(tile), first, until))
    found += _between_uses(graph, context)
    return [span for span in found if span.nbytes and span.first <= span.last]


def _between_uses(graph: fx.Graph, context: GraphContext) -> Iterator[Span]:
    """Of the tiles that stay in memory, from a release, or the head, to the next fetch, or the end."""
    last = operators_in(graph) - 1
    since = dict.fromkeys(context.staying, HEAD)
    for node in nodes_calling(graph, ops.fetch, ops.release):
        key, tile = key_of(node), context.tile_of(node)
        if node.kwargs.get("resident") and node.target is ops.fetch:
            yield Span(f"tile '{tile.label}'", tile_bytes(tile), since.pop(key, HEAD), operator_of(node) - 1)
        elif node.kwargs.get("resident"):
            since[key] = operator_of(node) + 1
    for key, first in since.items():
        tile = context.tile(key)
        yield Span(f"tile '{tile.label}'", tile_bytes(tile), first, last)


def held_by(graph: fx.Graph) -> dict[TileKey, list[range]]:
    """For each tile that a lowered graph uses, the operators from fetch to release of each of its stays."""
    fetched: dict[Stay, int] = {}
    held: dict[TileKey, list[range]] = {}
    own = (n for n in nodes_calling(graph, ops.fetch, ops.release) if not n.kwargs.get("turn"))
    for stay, node in stays_of(own):
        if node.target is ops.fetch:
            fetched[stay] = operator_of(node)
        else:
            held.setdefault(stay.key, []).append(range(fetched[stay], operator_of(node) + 1))
    return held


def _without(first: int, last: int, own: Iterable[range]) -> list[tuple[int, int]]:
    """The parts of first..last outside each of `own`."""
    parts = [(first, last)]
    for held in own:
        parts = [p for a, b in parts for p in ((a, min(b, held.start - 1)), (max(a, held.stop), b))]
    return [part for part in parts if part[0] <= part[1]]


class Ledger:
    """Bytes in flight per operator, the head included, against a budget (None: no limit)."""

    def __init__(self, entries: Iterable[Span], operators: int, budget: int | None) -> None:
        self.entries = list(entries)
        self.budget = budget
        change = [0] * (operators + 2)  # the head stands first
        for entry in self.entries:
            change[entry.first + 1] += entry.nbytes
            change[entry.last + 2] -= entry.nbytes
        self._live = list(accumulate(change))[:-1]

    def over_budget(self) -> int | None:
        """The first operator with more bytes in flight than the budget."""
        if self.budget is None:
            return None
        return next((i - 1 for i, live in enumerate(self._live) if live > self.budget), None)

    def fullest(self) -> int:
        """The operator with the most bytes in flight, the first of several."""
        return self._live.index(max(self._live)) - 1

    def at(self, operator: int) -> int:
        """Bytes in flight in one operator."""
        return self._live[operator + 1]

    def largest(self, operator: int, count: int = 3) -> list[Span]:
        """The largest entries that are in flight in one operator."""
        held = [entry for entry in self.entries if entry.first <= operator <= entry.last]
        return sorted(held, key=lambda entry: -entry.nbytes)[:count]

    def extend(self, nbytes: int, end: int, wanted: int) -> int:
        """Stretch something that is in flight at operator `end` towards `wanted`, as far as there is room.

        Returns where it then begins or ends.
        """
        if self.budget is None:
            return wanted
        step = 1 if wanted > end else -1
        while end != wanted and self.take(nbytes, end + step):
            end += step
        return end

    def take(self, nbytes: int, operator: int) -> bool:
        """Whether so many bytes more are in flight in one operator from now on: not if the budget has no room."""
        if self.budget is not None and self._live[operator + 1] + nbytes > self.budget:
            return False
        self._live[operator + 1] += nbytes
        return True
