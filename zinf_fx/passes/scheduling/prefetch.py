"""The static schedule: while operator i computes, the all-gather of i+1, upload of i+2 and fetch of i+3 are under way.

ZeRO-Infinity, section 6.2, with the operator sequence known beforehand instead of traced on the fly. In backward,
the reduce-scatter of an operator's gradients overlaps the next operator and their offload the one after. The forward
graph starts the prologue of the backward graph in its last operators, as if the two were one sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.errors import BudgetError
from zinf_fx.passes.ir.framework import (
    GraphContext,
    Pass,
    PrologueTransfer,
    event_of,
    events_in,
    give_event,
    nodes_calling,
    operator_of,
    set_event,
    start_argument,
    tokens_in,
)
from zinf_fx.passes.ir.in_flight import Ledger, gradient_bytes, operators_in, outline, spans, tile_bytes
from zinf_fx.passes.scheduling.refusal import refusal
from zinf_fx.plan.lifetimes import TRANSFERS, Lifetimes
from zinf_fx.plan.schedule import PROLOGUE

# Bytes that are on their way in inference, where operators may take less time than a request: twice the requests that
# the engine has under way, which the disk serves side by side, so that it has more when these are done.
_UNDER_WAY = 128 << 20
# Operators between the one that computes a gradient and the one during which it is offloaded.
_OFFLOAD_DISTANCE = 2


@dataclass(frozen=True)
class Prefetch(Pass):
    """Move every transfer as many operators ahead of its use as `distances` and the byte budget allow.

    Where a transfer at its full distance would exceed the budget, it starts later. First come the tiles that the graph
    itself needs, then those that it starts for backward, then the time that gradients may wait for their offload.
    BudgetError when even what each operator uses exceeds the budget.

    Attributes:
        distances: operators between use and the start of (all-gather, upload, fetch); None: each starts in the operator
            that uses it, gradients are offloaded at once, and nothing starts for backward. In inference a fetch starts
            earlier where less than 128 MiB are fetched for the operators in between.
    """

    name = "prefetch"
    requires = ("lowered",)
    provides = ("prefetched",)

    distances: tuple[int, int, int] | None = (1, 2, 3)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        ledger = Ledger(spans(graph, context), operators_in(graph), context.budget)
        if ledger.over_budget() is not None:
            raise BudgetError(refusal(ledger, context))
        self._move_ahead(graph, context, ledger)
        if self.distances is not None:
            _start_successor(graph, context, ledger)
            _delay_offloads(graph, context, ledger)
        return context

    def prologue(self, graph: fx.Graph, context: GraphContext) -> tuple[PrologueTransfer, ...]:
        """What a scheduled graph needs in its prologue, for the `successor_prologue` of the graph before it:
        parameters. What activations it needs first, that graph has only just computed; the same of parameters that it
        writes to."""
        use = {event_of(node).tile: operator_of(node) for node in reversed(list(nodes_calling(graph, ops.wait)))}
        return tuple(
            PrologueTransfer(op, tile, self._distance_of[op] - use[tile])
            for node in nodes_calling(graph, *ops.TRANSFERS)
            if isinstance(op := node.target, torch._ops.OpOverload)
            and operator_of(node) == PROLOGUE
            and not context.table[tile := event_of(node).tile].activation
            and context.keys[tile].token not in context.written
        )

    @property
    def _distance_of(self) -> dict[torch._ops.OpOverload, int]:
        return dict(zip(reversed(ops.TRANSFERS), self.distances or (0, 0, 0), strict=True))

    def _move_ahead(self, graph: fx.Graph, context: GraphContext, ledger: Ledger) -> None:
        lifetimes, nodes, starts = Lifetimes([outline(graph, context)]), events_in(graph), operator_starts(graph)
        distance_of, fills_the_queue = self._distance_of, None
        if context.kind == "inference" and self.distances is not None:
            fetched = Counter[int]()
            for live_range in lifetimes:
                fetched[live_range.fetch.operator] += tile_bytes(context.table[live_range.tile])
            fills_the_queue = _under_way(fetched)
        moved = []
        for live_range in sorted(lifetimes, key=lambda live_range: live_range.fetch):
            use, before = live_range.fetch.operator, PROLOGUE - 1
            if live_range.number and context.comes_anew(context.keys[live_range.tile].token):
                earlier = lifetimes.of_tile[live_range.tile][live_range.number - 1]
                before = earlier.release.operator  # it ends first
            wanted = use - distance_of[ops.fetch]
            if fills_the_queue is not None:
                wanted = min(wanted, fills_the_queue(use))
            wanted = max(wanted, PROLOGUE, before + 1)
            earliest = ledger.extend(tile_bytes(context.table[live_range.tile]), use, wanted)
            for number in (live_range.steps[kind].number for kind in TRANSFERS):
                target = nodes[number].target
                assert isinstance(target, torch._ops.OpOverload)
                start = earliest if target is ops.fetch else max(use - distance_of[target], earliest)
                moved.append((start, use, number))
        # What starts first stands first: the prologue before operator 0, which may begin at the same node. Among those
        # of one operator the nearer use stands first, because the disk serves requests in order.
        for operator, _, number in sorted(moved):
            move_to(nodes[number], operator, starts[operator])


def _under_way(fetched: Mapping[int, int]) -> Callable[[int], int]:
    """For an operator, the last one before it from which on `_UNDER_WAY` bytes are fetched for others before it;
    PROLOGUE: there are not so many. `fetched`: bytes, by the operators that use them."""
    before = [0, *accumulate(fetched[operator] for operator in range(max(fetched, default=PROLOGUE) + 1))]

    def first_operator(operator: int) -> int:
        return max(bisect_right(before, before[operator] - _UNDER_WAY) - 1, PROLOGUE)

    return first_operator


def _start_successor(graph: fx.Graph, context: GraphContext, ledger: Ledger) -> None:
    """Start what the next graph needs in its prologue."""
    count, starts = operators_in(graph), operator_starts(graph)
    tokens = tokens_in(graph)
    held: defaultdict[int, set[int]] = defaultdict(set)
    for live_range in Lifetimes([outline(graph, context)]):
        held[live_range.tile].update(range(live_range.fetch.operator, live_range.release.operator + 1))
    fetched: dict[int, int] = {}
    for op, tile, early in context.successor_prologue if count else ():
        if (key := context.keys[tile]).token not in tokens:
            continue  # a pack that only backward has
        # In a graph that is shorter than the distance, they start right after the graph's own prologue.
        operator = max(count - early, 0)
        if op is ops.fetch:
            fetched[tile] = ledger.extend(tile_bytes(context.table[tile]), count, operator, held[tile])
        if fetched[tile] < count:
            operator = max(operator, fetched[tile])
            with graph.inserting_before(starts[operator]):
                node = graph.call_function(op, (tokens[key.token],), start_argument(key))
            give_event(node, context, operator, for_backward=True)


def _delay_offloads(graph: fx.Graph, context: GraphContext, ledger: Ledger) -> None:
    """While operator i computes, gradients of i-1 are reduce-scattered and those of i-2 offloaded."""
    last, starts = operators_in(graph) - 1, operator_starts(graph)
    for node in nodes_calling(graph, ops.offload):
        made = operator_of(node)
        wanted = min(made + _OFFLOAD_DISTANCE, last)
        until = ledger.extend(gradient_bytes(context.tile_of(node)), made, wanted)
        place_offload(node, until, last, starts, graph.output_node())


def operator_starts(graph: fx.Graph) -> dict[int, fx.Node]:
    """The node before which each operator's transfers are inserted; PROLOGUE: before everything."""
    starts: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node.target in (ops.pack, *ops.TRANSFERS):
            continue
        starts.setdefault(PROLOGUE, node)
        if node.op != "output":
            starts.setdefault(operator_of(node), node)
    return starts


def place_offload(node: fx.Node, operator: int, last: int, starts: dict[int, fx.Node], output: fx.Node) -> None:
    """Move the offload of a gradient from the operator that made it to a later one. What has no time to wait before the
    graph ends leaves at its end."""
    made = operator_of(node)
    if operator == last < made + _OFFLOAD_DISTANCE:
        move_to(node, last, output)
    elif operator > made:
        move_to(node, operator, starts[operator])


def move_to(node: fx.Node, operator: int, before: fx.Node) -> None:
    """Move an event's node before another one, into an operator."""
    set_event(node, replace(event_of(node), operator=operator))
    before.prepend(node)
