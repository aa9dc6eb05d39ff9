"""The static schedule: while operator i computes, the all-gather of i+1, upload of i+2 and fetch of i+3 are under way.

ZeRO-Infinity, section 6.2, with the operator sequence known beforehand instead of traced on the fly. In backward,
the reduce-scatter of an operator's gradients overlaps the next operator and their offload the one after. The forward
graph starts the head of the backward graph in its last operators, as if the two were one sequence: the turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.errors import BudgetError
from zinf_fx.passes.framework import (
    OPERATOR,
    GraphContext,
    HeadTransfer,
    Stay,
    TileKey,
    key_of,
    nodes_calling,
    operator_of,
    start_argument,
    stays_of,
)
from zinf_fx.passes.in_flight import Ledger, gradient_bytes, held_by, operators_in, spans, tile_bytes
from zinf_fx.passes.refusal import refusal
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

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        ledger = Ledger(spans(graph, context), operators_in(graph), context.budget)
        if ledger.over_budget() is not None:
            raise BudgetError(refusal(ledger, context))
        if self.distances is None:
            self._move_ahead(graph, context, ledger, (0, 0, 0))
        else:
            self._move_ahead(graph, context, ledger, self.distances)
            self._start_successor(graph, context, ledger)
            self._delay_offloads(graph, context, ledger)

    def head(self, graph: fx.Graph, context: GraphContext) -> tuple[HeadTransfer, ...]:
        """What a scheduled graph needs at its head, for the `successor_head` of the graph before it: parameters. What
        activations it needs first, that graph has only just computed."""
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
            if operator_of(node) == HEAD and not context.tile_of(node).activation
        )

    def _move_ahead(
        self, graph: fx.Graph, context: GraphContext, ledger: Ledger, distances: tuple[int, int, int]
    ) -> None:
        distance_of = dict(zip((ops.allgather, ops.upload, ops.fetch), distances, strict=True))
        transfers = list(stays_of(nodes_calling(graph, *ops.TRANSFERS)))
        gone = {
            stay: operator_of(node)
            for stay, node in stays_of(nodes_calling(graph, ops.release))
            if context.comes_anew(stay.key.token)
        }
        earliest: dict[Stay, int] = {}
        for stay, node in transfers:
            if node.target is ops.fetch:
                tile, use = context.tile_of(node), operator_of(node)
                before = gone.get(Stay(stay.key, stay.number - 1), HEAD - 1)  # its stay before ends first
                wanted = max(use - distance_of[ops.fetch], HEAD, before + 1)
                earliest[stay] = ledger.extend(tile_bytes(tile), use, wanted)
        # What starts first stands first: the head before operator 0, which may begin at the same node. Among those of
        # one operator the nearer use stands first, because the disk serves requests in order.
        moved = []
        for stay, node in transfers:
            use = operator_of(node)
            moved.append((max(use - distance_of[node.target], earliest[stay], HEAD), use, node))
        starts = operator_starts(graph)
        for operator, _, node in sorted(moved, key=lambda m: m[:2]):
            place(node, operator, starts[operator])

    def _start_successor(self, graph: fx.Graph, context: GraphContext, ledger: Ledger) -> None:
        count = operators_in(graph)
        starts = operator_starts(graph)
        tokens = {node.name: node for node in graph.find_nodes(op="placeholder")}
        own = held_by(graph)
        fetched: dict[TileKey, int | None] = {}
        for transfer in context.successor_head if count else ():
            # In a graph that is shorter than the distance, the turn starts right behind the graph's own head.
            operator = max(count - transfer.operators_early, 0)
            if transfer.op is ops.fetch:
                held = {number for stay in own.get(transfer.key, ()) for number in stay}
                nbytes = tile_bytes(context.tile(transfer.key))
                fetched[transfer.key] = _room_until_end(ledger, nbytes, range(operator, count), held)
            if (start := fetched[transfer.key]) is None:
                continue
            operator = max(operator, start)
            with graph.inserting_before(starts[operator]):
                start_for_next(graph, transfer.op, tokens[transfer.token], transfer.key, operator)

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


def start_for_next(graph: fx.Graph, op: torch._ops.OpOverload, token: fx.Node, key: TileKey, operator: int) -> fx.Node:
    """A transfer that the turn starts; it is to be placed."""
    node = graph.call_function(op, (token,), {**start_argument(key), "turn": True})
    node.meta[OPERATOR] = operator
    return node


def place_offload(node: fx.Node, operator: int, last: int, starts: dict[int, fx.Node], output: fx.Node) -> None:
    """Move the offload of a gradient from the operator that made it to a later one. What has no time to wait before the
    graph ends leaves at its end."""
    made = operator_of(node)
    if operator == last < made + _OFFLOAD_DISTANCE:
        place(node, last, output)
    elif operator > made:
        place(node, operator, starts[operator])


def place(node: fx.Node, operator: int, before: fx.Node) -> None:
    """Move a node before another one, into an operator."""
    node.meta[OPERATOR] = operator
    before.prepend(node)
