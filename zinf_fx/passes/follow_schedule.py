"""The schedule that a plan has for a graph, put there again: the place of each transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import fx

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.framework import GraphContext, Stay, TileKey, nodes_calling, stays_of
from zinf_fx.passes.in_flight import operators_in
from zinf_fx.passes.prefetch import operator_starts, place, place_offload, start_for_next
from zinf_fx.plan.schedule import Event, EventKind, GraphSchedule

_OPS: dict[EventKind, Any] = {op._schema.name.split("::")[1]: op for op in ops.LOWERED}


@dataclass(frozen=True)
class FollowSchedule:
    """Put every transfer, and every offload of a gradient, into the operator where a plan has it; add the turn's."""

    name: ClassVar[str] = "follow_schedule"
    requires: ClassVar[tuple[str, ...]] = ("lowered",)
    provides: ClassVar[tuple[str, ...]] = ("prefetched",)
    changes_numerics: ClassVar[bool] = False

    schedule: GraphSchedule

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        keys, last, starts = keys_by_label(context), operators_in(graph) - 1, operator_starts(graph)
        nodes = {}
        for stay, node in stays_of(nodes_calling(graph, *ops.TRANSFERS, ops.offload)):
            nodes[stay, node.target] = node
        inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
        output = next(iter(graph.find_nodes(op="output")))
        for stay, event in events_by_stay(self.schedule, keys):
            op = _OPS[event.kind]
            if op in ops.TRANSFERS or op is ops.offload:
                if event.operator > last:
                    raise PlanError(f"the plan has a {event.kind} in operator {event.operator} of {last + 1}")
                if event.turn:
                    if stay.key.token not in inputs:
                        label = self.schedule.tiles[event.tile].label
                        raise PlanError(f"the plan's turn moves '{label}', which the forward graph has no token of")
                    with graph.inserting_before(starts[event.operator]):
                        start_for_next(graph, op, inputs[stay.key.token], stay.key, event.operator)
                    continue
                node = nodes.get((stay, op))
                if node is None:
                    label = self.schedule.tiles[event.tile].label
                    raise PlanError(f"the plan has one more {event.kind} of '{label}' than the {context.kind} graph")
                if op is not ops.offload:
                    place(node, event.operator, starts[event.operator])
                elif context.config.prefetch is not None:
                    place_offload(node, event.operator, last, starts, output)


class StayEvent(NamedTuple):
    """An event, and the stay of its tile that it belongs to."""

    stay: Stay
    event: Event


def events_by_stay(schedule: GraphSchedule, keys: Mapping[str, TileKey]) -> Iterator[StayEvent]:
    """The events of a schedule, each with the stay of its tile that it belongs to."""
    counts: Counter[tuple[int, str, bool]] = Counter()
    for event in schedule.events:
        label = schedule.tiles[event.tile].label
        if label not in keys:
            raise PlanError(f"the plan moves '{label}', which the captured graph has not")
        of_kind = (event.tile, event.kind, event.turn)
        yield StayEvent(Stay(keys[label], counts[of_kind]), event)
        counts[of_kind] += 1


def keys_by_label(context: GraphContext) -> dict[str, TileKey]:
    """The key of each tile, by its label. Raises: PlanError when two share one."""
    found: dict[str, TileKey] = {}
    for token in context.tiles:
        for key, tile in context.tiles_of(token).items():
            if tile.label in found:
                raise PlanError(
                    f"two of the model's tensors are called '{tile.label}': no plan file can tell them apart"
                )
            found[tile.label] = key
    return found
