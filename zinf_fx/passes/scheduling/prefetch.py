"""The static schedule: while operator i computes, the all-gather of i+1, upload of i+2 and fetch of i+3 are under way.

ZeRO-Infinity, section 6.2, with the operator sequence known beforehand instead of traced on the fly. In backward,
the reduce-scatter of an operator's gradients overlaps the next operator and their offload the one after. The forward
graph starts the head of the backward graph in its last operators, as if the two were one sequence: the turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zinf_fx import ops
from zinf_fx.errors import BudgetError
from zinf_fx.passes.ir.framework import (
    GraphContext,
    HeadTransfer,
    TileKey,
    event_of,
    events_in,
    give_event,
    key_of,
    nodes_calling,
    operator_of,
    set_event,
    start_argument,
)
from zinf_fx.passes.ir.in_flight import Ledger, gradient_bytes, operators_in, outline, spans, tile_bytes
from zinf_fx.passes.scheduling.refusal import refusal
from zinf_fx.plan.journeys import Journeys, Stay
from zinf_fx.plan.schedule import HEAD

# Operators between the one that computes a gradient and the one during which it is offloaded.
_OFFLOAD_DISTANCE = 2


@dataclass(frozen=True)
class Prefetch:
    """Move every transfer as many operators ahead of its use as `distances` and the byte budget allow.

    Where a transfer at its full distance would exceed the budget, it starts later. First come the tiles that the graph
    itself needs, then those of the turn, then the time that gradients may wait for their offload. BudgetError when even
    what each operator uses exceeds the budget.

    Attributes:
        distances: operators between use and the start of (all-gather, upload, fetch); None: each starts in the operator
            that uses it, gradients leave at once, and there is no turn.
    """

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[tuple[str, ...]] = ("lowered",)
    provides: ClassVar[tuple[str, ...]] = ("prefetched",)
    changes_numerics: ClassVar[bool] = False

    distances: tuple[int, int, int] | None = (1, 2, 3)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        ledger = Ledger(spans(graph, context), operators_in(graph), context.budget)
        if ledger.over_budget() is not None:
            raise BudgetError(refusal(ledger, context))
        if self.distances is None:
            self._move_ahead(graph, context, ledger, (0, 0, 0))
        else:
            self._move_ahead(graph, context, ledger, self.distances)
            self._start_successor(graph, context, ledger)
            self._delay_offloads(graph, context, ledger)
        return context

    def head(self, graph: fx.Graph, context: GraphContext) -> tuple[HeadTransfer, ...]:
        """What a scheduled graph needs at its head, for the `successor_head` of the graph before it: parameters. What
        activations it needs first, that graph has only just computed; the same of parameters that it writes to."""
        distance_of = dict(zip((ops.allgather, ops.upload, ops.fetch), self.distances or (0, 0, 0), strict=True))
        use: dict[TileKey, int] = {}
        for node in nodes_calling(graph, ops.wait):
            use.setdefault(key_of(node), operator_of(node))
        return tuple(
            HeadTransfer(
                node.target,
                node.args[0].name,
                distance_of[node.target] - use[key_of(node)],
                key_of(node).start,
            )
            for node in nodes_calling(graph, *ops.TRANSFERS)
            if operator_of(node) == HEAD
            and not (context.tile_of(node).activation or key_of(node).token in context.written)
        )

    def _move_ahead(
        self, graph: fx.Graph, context: GraphContext, ledger: Ledger, distances: tuple[int, int, int]
    ) -> None:
        distance_of = dict(zip((ops.allgather, ops.upload, ops.fetch), distances, strict=True))
        journeys, nodes = Journeys([outline(graph, context)]), events_in(graph)
        earliest: dict[Stay, int] = {}
        for stay in sorted(journeys, key=lambda stay: stay.fetch):
            use, before = stay.fetch.operator, HEAD - 1
            if stay.number and context.comes_anew(context.keys[stay.tile].token):
                before = journeys.of_tile[stay.tile][stay.number - 1].release.operator  # this one ends first
            wanted = max(use - distance_of[ops.fetch], HEAD, before + 1)
            earliest[stay] = ledger.extend(tile_bytes(context.table[stay.tile]), use, wanted)
        # What starts first stands first: the head before operator 0, which may begin at the same node. Among those of
        # one operator the nearer use stands first, because the disk serves requests in order.
        moved = []
        for number, node in enumerate(nodes):
            if node.target in ops.TRANSFERS:
                use, stay = operator_of(node), journeys.stay_of(0, number)
                moved.append((max(use - distance_of[node.target], earliest[stay], HEAD), use, node))
        starts = operator_starts(graph)
        for operator, _, node in sorted(moved, key=lambda m: m[:2]):
            place(node, operator, starts[operator])

    def _start_successor(self, graph: fx.Graph, context: GraphContext, ledger: Ledger) -> None:
        count = operators_in(graph)
        starts = operator_starts(graph)
        tokens = {node.name: node for node in graph.find_nodes(op="placeholder")}
        held: dict[TileKey, set[int]] = {}
        for stay in Journeys([outline(graph, context)]):
            during = range(stay.fetch.operator, stay.release.operator + 1)
            held.setdefault(context.keys[stay.tile], set()).update(during)
        fetched: dict[TileKey, int | None] = {}
        for transfer in context.successor_head if count else ():
            # In a graph that is shorter than the distance, the turn starts right behind the graph's own head.
            operator = max(count - transfer.operators_early, 0)
            if transfer.op is ops.fetch:
                nbytes, there = tile_bytes(context.tile(transfer.key)), held.get(transfer.key, set())
                fetched[transfer.key] = _room_until_end(ledger, nbytes, range(operator, count), there)
            if (start := fetched[transfer.key]) is None:
                continue
            operator = max(operator, start)
            with graph.inserting_before(starts[operator]):
                node = graph.call_function(transfer.op, (tokens[transfer.token],), start_argument(transfer.key))
            give_event(node, context, operator, turn=True)

    def _delay_offloads(self, graph: fx.Graph, context: GraphContext, ledger: Ledger) -> None:
        """While operator i computes, gradients of i-1 are reduce-scattered and those of i-2 offloaded."""
        last = operators_in(graph) - 1
        starts = operator_starts(graph)
        output = next(iter(graph.find_nodes(op="output")))
        for node in nodes_calling(graph, ops.offload):
            tile, made = context.tile_of(node), operator_of(node)
            wanted = min(made + _OFFLOAD_DISTANCE, last)
            place_offload(node, ledger.extend(gradient_bytes(tile), made, wanted), last, starts, output)


def _room_until_end(ledger: Ledger, nbytes: int, wanted: range, held: set[int]) -> int | None:
    """The first operator of `wanted` from which on, to its end, there is room; None: there is none in the last.

    While the graph holds the tile for itself, in `held`, the turn may hold it too at no cost.
    """
    start = None
    for operator in reversed(wanted):
        if operator not in held and not ledger.take(nbytes, operator):
            break
        start = operator
    return start


def operator_starts(graph: fx.Graph) -> dict[int, fx.Node]:
    """The node before which each operator's transfers are inserted; HEAD: before everything."""
    starts: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node.target in ops.TRANSFERS:
            continue
        starts.setdefault(HEAD, node)
        if node.op != "output":
            starts.setdefault(operator_of(node), node)
    return starts


def place_offload(node: fx.Node, operator: int, last: int, starts: dict[int, fx.Node], output: fx.Node) -> None:
    """Move the offload of a gradient from the operator that made it to a later one. What has no time to wait before the
    graph ends leaves at its end."""
    made = operator_of(node)
    if operator == last < made + _OFFLOAD_DISTANCE:
        place(node, last, output)
    elif operator > made:
        place(node, operator, starts[operator])


def place(node: fx.Node, operator: int, before: fx.Node) -> None:
    """Move an event's node before another one, into an operator."""
    set_event(node, replace(event_of(node), operator=operator))
    before.prepend(node)
