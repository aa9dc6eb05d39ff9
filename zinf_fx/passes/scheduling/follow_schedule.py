"""The schedule of a plan, put into a lowered graph: its events take the places of those that lowering made."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.ir.framework import (
    GraphContext,
    event_of,
    events_in,
    nodes_calling,
    operator_of,
    set_event,
    start_argument,
)
from zinf_fx.passes.ir.in_flight import operators_in, outline
from zinf_fx.passes.scheduling.prefetch import operator_starts, place_offload
from zinf_fx.plan.journeys import STEPS, TRANSFERS, Journeys
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Event, GraphKind

_OPS = {kind: op for op, kind in ops.KINDS.items()}


@dataclass(frozen=True)
class FollowSchedule:
    """Make the events of a lowered graph those of a plan: transfers and offloads go where the plan has them, the turn's
    transfers are added, and what stays in memory and where buffers lie is as the events say."""

    name: ClassVar[str] = "follow_schedule"
    requires: ClassVar[tuple[str, ...]] = ("lowered",)
    provides: ClassVar[tuple[str, ...]] = ("prefetched", "residency", "buffers")
    changes_numerics: ClassVar[bool] = False

    plan: Plan
    kind: GraphKind

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        number = [one.kind for one in self.plan.graphs].index(self.kind)
        schedule = self.plan.graphs[number]
        self._check_tiles(context, number)
        nodes = self._nodes(graph, context, number)
        last, starts = operators_in(graph) - 1, operator_starts(graph)
        inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
        output = next(iter(graph.find_nodes(op="output")))
        for position, event in enumerate(schedule.events):
            if event.operator > last:
                raise PlanError(f"the plan has a {event.kind} in operator {event.operator} of {last + 1}")
            node = nodes.get(position)
            if node is None:
                _start_for_next(graph, context, inputs, event, starts[event.operator])
            elif node.target in ops.TRANSFERS:
                starts[event.operator].prepend(node)
                set_event(node, event)
            else:
                if node.target is ops.offload and context.config.prefetch is not None:
                    place_offload(node, event.operator, last, starts, output)
                self._check_stands(node, event)
                set_event(node, event)
        self._check_order(graph, number)
        used = {stay.tile for stay in self.plan.journeys if stay.graph == number}
        throughout = sorted(self.plan.journeys.kept_at_begin(number) - used)
        return replace(context, staying=tuple(context.keys[tile] for tile in throughout), regions=self.plan.regions)

    def _check_tiles(self, context: GraphContext, number: int) -> None:
        theirs, ours = self.plan.graphs[number].tiles, context.table
        known: set[str] = set()
        for position, tile in enumerate(ours):
            if tile.label in known:
                raise PlanError(
                    f"two of the model's tensors are called '{tile.label}': no plan file can tell them apart"
                )
            known.add(tile.label)
            label = theirs[position].label if position < len(theirs) else "missing"
            if label != tile.label:
                raise PlanError(
                    f"tile {position} of the {self.kind} graph is {label} in the plan, and {tile.label} here"
                )
        for tile in theirs[len(ours) :]:
            raise PlanError(f"the plan moves '{tile.label}', which the captured graph has not")

    def _nodes(self, graph: fx.Graph, context: GraphContext, number: int) -> dict[int, fx.Node]:
        """By the numbers of the plan's events, the nodes of the lowered graph that they are: stay by stay of each tile,
        and departure by departure of each gradient."""
        found: dict[int, fx.Node] = {}
        nodes, theirs = events_in(graph), self.plan.journeys
        ours = Journeys([outline(graph, context)])
        for tile in range(len(context.table)):
            mine = ours.of_tile.get(tile, [])
            planned = [stay for stay in theirs.of_tile.get(tile, ()) if stay.graph == number]
            self._check_count("stays", context.table[tile].label, len(planned), len(mine))
            for here, there in zip(mine, planned, strict=True):
                found |= {there.steps[kind].number: nodes[here.steps[kind].number] for kind in STEPS}
        leaving: dict[bool, defaultdict[int, list]] = {}
        for planned, journeys, graph_number in ((True, theirs, number), (False, ours, 0)):
            leaving[planned] = defaultdict(list)
            for one in journeys.departures:
                if one.reduced.graph == graph_number:
                    leaving[planned][one.tile].append(one)
        for tile in sorted({*leaving[True], *leaving[False]}):
            mine, planned = leaving[False][tile], leaving[True][tile]
            self._check_count("gradients", context.table[tile].label, len(planned), len(mine))
            for here, there in zip(mine, planned, strict=True):
                found[there.reduced.number] = nodes[here.reduced.number]
                if there.offloaded is not None and here.offloaded is not None:
                    found[there.offloaded.number] = nodes[here.offloaded.number]
        once = {
            (event_of(n).kind, event_of(n).tile): n for n in nodes_calling(graph, ops.offload_activation, ops.write)
        }
        for position, event in enumerate(self.plan.graphs[number].events):
            if (event.kind, event.tile) in once:
                found[position] = once[event.kind, event.tile]
        return found

    def _check_count(self, what: str, label: str, planned: int, here: int) -> None:
        if planned != here:
            raise PlanError(f"'{label}' has {planned} {what} in the plan's {self.kind} graph, and {here} in this one")

    def _check_stands(self, node: fx.Node, event: Event) -> None:
        if operator_of(node) != event.operator:
            raise PlanError(
                f"the plan has a {event.kind} in operator {event.operator} of the {self.kind} graph, and here it is in "
                f"{operator_of(node)}"
            )

    def _check_order(self, graph: fx.Graph, number: int) -> None:
        planned, made = self.plan.graphs[number].events, tuple(map(event_of, events_in(graph)))
        if planned == made:
            return
        for position, (one, other) in enumerate(zip(planned, made, strict=False)):
            if one != other:
                raise PlanError(f"the {self.kind} graph's events[{position}] is {one} in the plan, and {other} here")
        raise PlanError(f"the {self.kind} graph has {len(planned)} events in the plan, and {len(made)} here")


def _start_for_next(
    graph: fx.Graph, context: GraphContext, inputs: dict[str, fx.Node], event: Event, before: fx.Node
) -> None:
    """Put a transfer of the turn into the graph."""
    key, label = context.keys[event.tile], context.table[event.tile].label
    if event.kind not in TRANSFERS or key.token not in inputs:
        raise PlanError(f"the plan's turn moves '{label}', which the forward graph has no token of")
    with graph.inserting_before(before):
        node = graph.call_function(_OPS[event.kind], (inputs[key.token],), start_argument(key))
    set_event(node, event)
