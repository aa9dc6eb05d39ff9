"""Which tiles stay in memory between two uses: what a schedule that is known beforehand can choose best.

A step uses tiles in an order that repeats: forward, backward, the optimizer's step, and again forward. Between two
uses of a tile lies a gap, in which it may stay in memory, if there is room throughout, and need not be moved again. Of
tiles of one size, most gaps are saved by taking them in the order of their ends, whenever there is room: what is used
next stays (Belady 1966; for spans of unit size it is the optimum).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.framework import GraphContext, Stay, TileKey, key_of, nodes_calling, operator_of, stays_of
from zinf_fx.passes.in_flight import Ledger, operators_in, spans, tile_bytes
from zinf_fx.plan.memory import chunk_buffers


class Use(NamedTuple):
    """One stay of a tile: in the graph of number `graph`, from operator `first` to operator `last`.

    What the graph before fetches in its turn is there before the head: `first` then counts on, downwards.
    """

    graph: int
    stay: Stay
    first: int
    last: int


@dataclass(frozen=True)
class Gap:
    """Between two uses of a tile, in the order of a step; `after` may be a use in the next step."""

    before: Use
    after: Use
    nbytes: int
    small: bool


@dataclass(frozen=True)
class Residency:
    """Mark what stays: its release, and the transfers of its next journey, which find it in memory.

    Attributes:
        leaves: the stays of tiles at whose end the tile stays in memory, in a graph that is scheduled.
        arrives: the stays of tiles that find it there.
        throughout: tiles that are in memory all the time, for uses before this graph and after it.
    """

    name: ClassVar[str] = "residency"
    requires: ClassVar[tuple[str, ...]] = ("prefetched",)
    provides: ClassVar[tuple[str, ...]] = ("residency",)
    changes_numerics: ClassVar[bool] = False

    leaves: frozenset[Stay] = frozenset()
    arrives: frozenset[Stay] = frozenset()
    throughout: tuple[TileKey, ...] = ()

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        context.staying = self.throughout
        for stay, node in list(stays_of(nodes_calling(graph, *ops.TRANSFERS, ops.release))):
            if node.kwargs.get("turn"):
                continue
            if stay in (self.leaves if node.target is ops.release else self.arrives):
                node.kwargs = {**node.kwargs, "resident": True}
        self._spare_turn(graph, context)

    def _spare_turn(self, graph: fx.Graph, context: GraphContext) -> None:
        """The next graph needs nothing at its head that stays for it."""
        stays = {key for key, last in _last_stays(graph).items() if last in self.leaves} | set(self.throughout)
        context.successor_head = tuple(t for t in context.successor_head if t.key not in stays)
        for stay, node in list(stays_of(nodes_calling(graph, *ops.TRANSFERS))):
            if node.kwargs.get("turn") and stay.key in stays:
                graph.erase_node(node)


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
    return [
        Residency(
            frozenset(gap.before.stay for gap in stay if gap.before.graph == number),
            frozenset(gap.after.stay for gap in stay if gap.after.graph == number),
            tuple(gap.before.stay.key for gap in stay if _passes(gap, number, len(graphs))),
        )
        for number in range(len(graphs))
    ]


def gaps_of(graphs: Sequence[tuple[fx.Graph, GraphContext]]) -> Iterator[Gap]:
    """The gaps between the uses of each tile; the last one of a step ends at the first use of the next, except of what
    has other values then."""
    uses: dict[TileKey, list[Use]] = {}
    early: dict[TileKey, int] = {}
    for number, (graph, _) in enumerate(graphs):
        for use in _uses(graph, number, early):
            uses.setdefault(use.stay.key, []).append(use)
        early = _turn(graph)
    for key, of_tile in uses.items():
        tile = graphs[of_tile[0].graph][1].tile(key)
        if tile_bytes(tile):
            # Another rank's shards are old after the optimizer's step, and have to be gathered anew.
            next_step = () if tile.activation or tile.partitioned else of_tile[:1]
            for before, after in pairwise((*of_tile, *next_step)):
                yield Gap(before, after, tile_bytes(tile), not tile.opens_operator)


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
        between = [range(begin, end)] if _same_step(gap) else [range(begin, len(self._free)), range(end)]
        if any(self._free[position] < gap.nbytes for part in between for position in part):
            return False
        for part in between:
            for position in part:
                self._free[position] -= gap.nbytes
        return True


def _order(gap: Gap) -> tuple[bool, bool, int, int, int, int]:
    """Small ones first; then what is needed next; of those, what was used last."""
    after, before = gap.after, gap.before
    return (not gap.small, not _same_step(gap), after.graph, after.first, -before.graph, -before.last)


def _same_step(gap: Gap) -> bool:
    """Whether no step ends in the gap."""
    return (gap.before.graph, gap.before.stay.number) < (gap.after.graph, gap.after.stay.number)


def _passes(gap: Gap, number: int, count: int) -> bool:
    """Whether a whole graph lies in the gap."""
    after = gap.after.graph + (0 if _same_step(gap) else count)
    return any(gap.before.graph < each < after for each in (number, number + count))


def _uses(graph: fx.Graph, number: int, early: Mapping[TileKey, int]) -> Iterator[Use]:
    """The stays of a scheduled graph's tiles; `early`: how many operators before its head which tiles were fetched."""
    fetched: dict[Stay, int] = {}
    for stay, node in stays_of(nodes_calling(graph, ops.fetch, ops.release)):
        if node.kwargs.get("turn"):
            continue
        if node.target is ops.release:
            yield Use(number, stay, fetched[stay], operator_of(node))
        else:
            fetched[stay] = operator_of(node) - (early.get(stay.key, 0) if stay.number == 0 else 0)


def _turn(graph: fx.Graph) -> dict[TileKey, int]:
    """What a graph fetches for the next one, and how many operators before its end."""
    count = operators_in(graph)
    fetches = (node for node in nodes_calling(graph, ops.fetch) if node.kwargs.get("turn"))
    return {key_of(node): count - operator_of(node) for node in fetches}


def _last_stays(graph: fx.Graph) -> dict[TileKey, Stay]:
    return {stay.key: stay for stay, _ in stays_of(nodes_calling(graph, ops.release))}
