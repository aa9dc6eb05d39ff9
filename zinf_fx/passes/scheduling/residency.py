"""Which tiles stay in memory between two uses: what a schedule that is known beforehand can choose best.

A step uses tiles in an order that repeats: forward, backward, the optimizer's step, and again forward. Between two
uses of a tile lies a gap, in which it may stay in memory, if there is room throughout, and need not be moved again. Of
tiles of one size, most gaps are saved by taking them in the order of their ends, whenever there is room: what is used
next stays (Belady 1966; for spans of unit size it is the optimum).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, NamedTuple

from torch import fx

from zinf_fx.passes.ir.framework import GraphContext, event_of, events_in, set_event
from zinf_fx.passes.ir.in_flight import Ledger, operators_in, outline, spans, tile_bytes
from zinf_fx.plan.journeys import TRANSFERS, Between, Journeys, Stay
from zinf_fx.plan.memory.use import chunk_buffers


class Use(NamedTuple):
    """When a tile is used: in the graph of number `graph`, from operator `first` to operator `last`.

    What the graph before fetches in its turn is there before the head: `first` then counts on, downwards.
    """

    graph: int
    first: int
    last: int


@dataclass(frozen=True)
class Gap:
    """Between two uses of a tile, in the order of a step.

    Attributes:
        before, after: the uses.
        nbytes: of the tile while it stays.
        small: whether it is a vector, and not a matrix.
        next_step: whether `after` is a use in the next step.
        stays: what the two uses are in the schedule.
    """

    before: Use
    after: Use
    nbytes: int
    small: bool
    next_step: bool = False
    stays: Between | None = None


@dataclass(frozen=True)
class Residency:
    """Mark what stays in memory: its release, and the transfers of its next stay, which find it there.

    Attributes:
        marked: the numbers of these events, in a graph that is scheduled.
        dropped: those of the transfers that the turn need not start, because their tile stays for the next graph.
        tiles: indices of the tiles that stay when the graph ends, or all the time.
        throughout: tiles that are in memory all the time, for uses before this graph and after it.
    """

    name: ClassVar[str] = "residency"
    requires: ClassVar[tuple[str, ...]] = ("prefetched",)
    provides: ClassVar[tuple[str, ...]] = ("residency",)
    changes_numerics: ClassVar[bool] = False

    marked: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    tiles: frozenset[int] = frozenset()
    throughout: tuple[int, ...] = ()

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        for number, node in enumerate(events_in(graph)):
            if number in self.marked:
                set_event(node, replace(event_of(node), resident=True))
            elif number in self.dropped:
                graph.erase_node(node)
        # The next graph needs nothing at its head that stays for it.
        head = tuple(one for one in context.successor_head if context.numbers[one.key] not in self.tiles)
        return replace(context, staying=tuple(context.keys[tile] for tile in self.throughout), successor_head=head)


def choose(graphs: Sequence[tuple[fx.Graph, GraphContext]], spare: int = 0) -> list[Residency]:
    """What stays in memory in the scheduled graphs of a step, in their order: within the room that they leave.

    Small parameters (vectors: norms, biases) come first. Without a budget nobody has said how much may stay, and only
    they do. `spare`: bytes of the room that are to be left.
    """
    context = graphs[0][1]
    room = None if context.budget is None else Room.of(graphs, spare)
    stay: list[Gap] = []
    if context.config.residency:
        for gap in sorted(gaps_of(graphs), key=_order):
            if gap.small if room is None else room.take(gap):
                stay.append(gap)
    kept = [gap.stays for gap in stay]
    return [_marks(kept, number, len(graphs)) for number in range(len(graphs))]


def _marks(kept: Sequence[Between], graph: int, graphs: int) -> Residency:
    """The pass for one of so many graphs, if tiles are kept between these stays."""
    marked: set[int] = set()
    dropped: set[int] = set()
    at_end: set[int] = set()
    throughout = []
    for pair in kept:
        if pair.before.graph == graph:
            marked.add(pair.before.release.number)
        if pair.after.graph == graph:
            marked |= {pair.after.steps[kind].number for kind in TRANSFERS}
        if pair.spans((graph + 1) % graphs):
            at_end.add(pair.before.tile)
            dropped |= {at.number for at in pair.after.ahead.values() if at.graph == graph}
        if graph not in (pair.before.graph, pair.after.graph) and pair.spans(graph):
            throughout.append(pair.before.tile)
    return Residency(frozenset(marked), frozenset(dropped), frozenset(at_end), tuple(throughout))


def gaps_of(graphs: Sequence[tuple[fx.Graph, GraphContext]]) -> Iterator[Gap]:
    """The gaps between the uses of each tile; the last one of a step ends at the first use of the next, except of what
    has other values then."""
    journeys, table = Journeys([outline(graph, context) for graph, context in graphs]), graphs[0][1].table
    counts = [operators_in(graph) for graph, _ in graphs]
    for index in sorted(journeys.of_tile):
        tile = table[index]
        # Another rank's shards are old after the optimizer's step, and have to be gathered anew.
        anew = tile.activation or tile.partitioned
        for pair in journeys.between(index) if tile_bytes(tile) else ():
            if not (pair.next_step and anew):
                before, after = (_use(stay, counts) for stay in (pair.before, pair.after))
                yield Gap(before, after, tile_bytes(tile), not tile.opens_operator, pair.next_step, pair)


def _use(stay: Stay, counts: Sequence[int]) -> Use:
    """`counts`: how many operators each graph has."""
    early = counts[stay.begin.graph] - stay.begin.operator if stay.ahead else 0
    return Use(stay.graph, stay.fetch.operator - early, stay.release.operator)


class Room:
    """Bytes that are free in each operator of a step: its graphs one after the other, and the optimizer's step."""

    def __init__(self, free: Sequence[int], starts: Sequence[int]) -> None:
        """`free`: by position; `starts`: the position of the head of each graph."""
        self._free = list(free)
        self._starts = starts

    @classmethod
    def of(cls, graphs: Sequence[tuple[fx.Graph, GraphContext]], spare: int = 0) -> Room:
        """What the budget, less `spare`, leaves beside what is in flight."""
        free: list[int] = []
        lengths = []
        for graph, context in graphs:
            count = operators_in(graph)
            ledger = Ledger(spans(graph, context), count, context.budget)
            free += [context.budget - ledger.at(operator) for operator in range(-1, count)]
            lengths.append(count + 1)
        context = graphs[-1][1]
        trained = [context.tiles[token] for token in context.gradients.values()]
        free.append(context.budget + context.gradient_buffer - chunk_buffers(context.config, trained).total)
        return cls([nbytes - spare for nbytes in free], [0, *accumulate(lengths)][: len(lengths)])

    def take(self, gap: Gap) -> bool:
        """Whether the tile can stay in this gap; if so, it has taken its room."""
        begin = self._starts[gap.before.graph] + gap.before.last + 2
        end = self._starts[gap.after.graph] + gap.after.first + 1
        between = [range(begin, len(self._free)), range(end)] if gap.next_step else [range(begin, end)]
        if any(self._free[position] < gap.nbytes for part in between for position in part):
            return False
        for part in between:
            for position in part:
                self._free[position] -= gap.nbytes
        return True


def _order(gap: Gap) -> tuple[bool, bool, int, int, int, int]:
    """Small ones first; then what is needed next; of those, what was used last."""
    after, before = gap.after, gap.before
    return (not gap.small, gap.next_step, after.graph, after.first, -before.graph, -before.last)
