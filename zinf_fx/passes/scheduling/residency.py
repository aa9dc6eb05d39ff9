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
from typing import NamedTuple

from torch import fx

from zinf_fx.passes.ir.framework import GraphContext, Pass, event_of, events_in, set_event
from zinf_fx.passes.ir.in_flight import Ledger, operators_in, outline, spans, tile_bytes
from zinf_fx.plan.lifetimes import TRANSFERS, Lifetimes, Reuse
from zinf_fx.plan.memory.use import chunk_buffers


@dataclass(frozen=True)
class Residency(Pass):
    """Mark what stays in memory: its release, and the transfers of its next live range, which find it there.

    Attributes:
        marked: the numbers of these events, in a graph that is scheduled.
        needless: those of the transfers that need not start for backward.
        tiles: indices of the tiles that stay when the graph ends, or all the time.
        throughout: tiles that are in memory all the time, for uses before this graph and after it.
    """

    name = "residency"
    requires = ("prefetched",)
    provides = ("residency",)

    marked: frozenset[int] = frozenset()
    needless: frozenset[int] = frozenset()
    tiles: frozenset[int] = frozenset()
    throughout: tuple[int, ...] = ()

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        for number, node in enumerate(events_in(graph)):
            if number in self.marked:
                set_event(node, replace(event_of(node), resident=True))
            elif number in self.needless:
                graph.erase_node(node)
        # The next graph needs nothing in its prologue that stays for it.
        prologue = tuple(transfer for transfer in context.successor_prologue if transfer.tile not in self.tiles)
        return replace(context, staying=self.throughout, successor_prologue=prologue)


class Gap(NamedTuple):
    """The time between two live ranges of a tile.

    Attributes:
        reuse: what lies before and after it.
        positions: where in a step it lies (see `free_bytes`); one that goes on in the next step has two parts.
        nbytes: of the tile.
        small: whether the tile is a vector, and not a matrix.
    """

    reuse: Reuse
    positions: tuple[range, ...]
    nbytes: int
    small: bool


def choose_residency(graphs: Sequence[tuple[fx.Graph, GraphContext]], spare: int) -> list[Residency]:
    """What stays in memory in the scheduled graphs of a step, in their order: within the room that they leave.

    Small parameters (vectors: norms, biases) come first. Without a budget nobody has said how much may stay, and only
    they do. `spare`: bytes of the room that are to be left.
    """
    context = graphs[0][1]
    free = None if context.budget is None else free_bytes(graphs, spare)
    kept = []
    if context.config.residency:
        for gap in sorted(_gaps(graphs), key=_order):
            if gap.small if free is None else take(free, gap):
                kept.append(gap.reuse)
    return [_marks(kept, number, len(graphs)) for number in range(len(graphs))]


def _marks(kept: Sequence[Reuse], graph: int, graphs: int) -> Residency:
    """The pass for one of so many graphs, if tiles are kept for these uses."""
    marked: set[int] = set()
    needless: set[int] = set()
    at_end: set[int] = set()
    throughout = []
    for pair in kept:
        if pair.before.graph == graph:
            marked.add(pair.before.release.number)
        if pair.after.graph == graph:
            marked |= {pair.after.steps[kind].number for kind in TRANSFERS}
        needless |= {at.number for at in pair.after.prefetched.values() if at.graph == graph}
        if pair.spans((graph + 1) % graphs):
            at_end.add(pair.before.tile)
        if graph not in (pair.before.graph, pair.after.graph) and pair.spans(graph):
            throughout.append(pair.before.tile)
    return Residency(frozenset(marked), frozenset(needless), frozenset(at_end), tuple(throughout))


def _gaps(graphs: Sequence[tuple[fx.Graph, GraphContext]]) -> Iterator[Gap]:
    """The gaps between the uses of each tile; the last one of a step ends at the first use of the next, except of what
    has other values then."""
    lifetimes, table = Lifetimes([outline(graph, context) for graph, context in graphs]), graphs[0][1].table
    prologues = [
        0,
        *accumulate(1 + operators_in(graph) for graph, _ in graphs),
    ]  # by graph, the position of its prologue
    for index in sorted(lifetimes.of_tile):
        tile = table[index]
        # Another rank's shards are old after the optimizer's step, and have to be gathered anew.
        anew = tile.activation or tile.partitioned
        for pair in lifetimes.reuses(index) if tile_bytes(tile) else ():
            if not (pair.next_step and anew):
                release, fetch = pair.before.release, pair.after.begin
                start, end = (prologues[at.graph] + at.operator + 1 for at in (release, fetch))
                parts = (
                    (range(start + 1, prologues[-1] + 1), range(end)) if pair.next_step else (range(start + 1, end),)
                )
                yield Gap(pair, parts, tile_bytes(tile), not tile.opens_operator)


def free_bytes(graphs: Sequence[tuple[fx.Graph, GraphContext]], spare: int) -> list[int]:
    """What the budget, less `spare`, leaves beside what is in flight, by position in a step: in the prologue and each
    operator of its graphs, one after the other, and in the optimizer's step."""
    free: list[int] = []
    for graph, context in graphs:
        count = operators_in(graph)
        ledger = Ledger(spans(graph, context), count, context.budget)
        assert context.budget is not None
        free += [context.budget - ledger.at(operator) for operator in range(-1, count)]
    context = graphs[-1][1]
    assert context.budget is not None
    trained = [context.tiles[token] for token in context.gradients.values()]
    free.append(context.budget + context.gradient_buffer - chunk_buffers(context.config, trained).total)
    return [nbytes - spare for nbytes in free]


def take(free: list[int], gap: Gap) -> bool:
    """Whether the tile can stay in this gap; if so, it has taken its room of the `free_bytes`."""
    parts = [slice(part.start, part.stop) for part in gap.positions]
    if any(min(free[part], default=gap.nbytes) < gap.nbytes for part in parts):
        return False
    for part in parts:
        free[part] = [nbytes - gap.nbytes for nbytes in free[part]]
    return True


def _order(gap: Gap) -> tuple[bool, bool, int, int, int]:
    """Small ones first; then what is needed next; of those, what was used last."""
    reuse, start, end = gap.reuse, gap.positions[0].start, gap.positions[-1].stop
    return (not gap.small, reuse.next_step, reuse.after.graph, end, -start)
