"""The schedule of a plan, put into a lowered graph: its events take the places of those that lowering made."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import fx

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.ir.framework import (
    GraphContext,
    Pass,
    event_of,
    events_in,
    operator_of,
    set_event,
    start_argument,
    tokens_in,
)
from zinf_fx.passes.ir.in_flight import operators_in
from zinf_fx.passes.scheduling.prefetch import operator_starts, place_offload
from zinf_fx.plan.lifetimes import TRANSFERS
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Event, EventKind, GraphKind

_OPS = {kind: op for op, kind in ops.KINDS.items()}


@dataclass(frozen=True)
class FollowSchedule(Pass):
    """Make the events of a lowered graph those of a plan.

    The plan's transfers, those for backward included, are put where the plan has them, and offloads move there. All
    other events stand where they are computed, and only take over what the plan says of them.
    """

    name = "follow_schedule"
    requires = ("lowered",)
    provides = ("prefetched", "residency")

    plan: Plan
    kind: GraphKind

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        number = [graph_schedule.kind for graph_schedule in self.plan.graphs].index(self.kind)
        schedule = self.plan.graphs[number]
        check_items(f"the {self.kind} graph's tiles", schedule.tiles, context.table)
        tokens = tokens_in(graph)
        last, starts = operators_in(graph) - 1, operator_starts(graph)
        standing = self._without_transfers(graph, context, schedule.events)
        for event in schedule.events:
            if event.operator > last:
                raise PlanError(f"the plan has a {event.kind} in operator {event.operator} of {last + 1}")
            if event.kind in TRANSFERS:
                key = context.keys[event.tile]
                if key.token not in tokens:
                    label = context.table[event.tile].label
                    raise PlanError(f"the plan moves '{label}', which the {self.kind} graph has no token of")
                with graph.inserting_before(starts[event.operator]):
                    node = graph.call_function(_OPS[event.kind], (tokens[key.token],), start_argument(key))
            else:
                node = standing[event.kind, event.tile].popleft()
                if event.kind == "offload" and context.config.prefetch is not None:
                    place_offload(node, event.operator, last, starts, graph.output_node())
                if operator_of(node) != event.operator:
                    raise PlanError(
                        f"the plan has a {event.kind} in operator {event.operator} of the {self.kind} graph, and here "
                        f"it is in {operator_of(node)}"
                    )
            set_event(node, event)
        used = {live_range.tile for live_range in self.plan.lifetimes if live_range.graph == number}
        throughout = sorted(self.plan.lifetimes.kept_at_begin(number) - used)
        return replace(context, staying=tuple(throughout), regions=self.plan.regions, update=self.plan.update)

    def _without_transfers(
        self, graph: fx.Graph, context: GraphContext, planned: Sequence[Event]
    ) -> dict[tuple[EventKind, int], deque[fx.Node]]:
        """Remove the transfers that lowering made. Returns what is left, in order, by kind and tile: the plan's."""
        standing: defaultdict[tuple[EventKind, int], deque[fx.Node]] = defaultdict(deque)
        for node in events_in(graph):
            event = event_of(node)
            if event.kind in TRANSFERS:
                graph.erase_node(node)
            else:
                standing[event.kind, event.tile].append(node)
        due: Counter[tuple[EventKind, int]] = Counter(
            (event.kind, event.tile) for event in planned if event.kind not in TRANSFERS
        )
        for kind, tile in sorted({*due, *standing}):
            if due[kind, tile] != len(standing[kind, tile]):
                raise PlanError(
                    f"the plan's {self.kind} graph has {due[kind, tile]} {kind} of '{context.table[tile].label}', and "
                    f"this one {len(standing[kind, tile])}"
                )
        return standing


def check_items(what: str, theirs: Sequence[Any], ours: Sequence[Any]) -> None:
    """Check that the items of a plan are those of the model at hand. Raises: PlanError naming the first difference."""
    for number, (planned, resulting) in enumerate(zip(theirs, ours, strict=False)):
        for attribute in fields(planned) if planned != resulting else ():
            if (made := getattr(planned, attribute.name)) != (here := getattr(resulting, attribute.name)):
                where = f"{what}[{number}].{attribute.name}"
                raise PlanError(f"{where} is {made!r} in the plan, and {here!r} for this model")
    if len(theirs) != len(ours):
        raise PlanError(f"{what} are {len(theirs)} in the plan, and {len(ours)} for this model")
