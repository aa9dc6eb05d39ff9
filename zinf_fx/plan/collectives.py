"""What ranks that run a plan together have to do alike: the collectives of its graphs, in their order. How large
activations are is each rank's own matter."""

from __future__ import annotations

import json

from zinf_fx.plan.codec import encode
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Event, GraphSchedule


def collectives_in(schedule: GraphSchedule) -> list[Event]:
    """The events of a graph that may start a collective over the ranks that train the model, in their order.

    All-gathers and reduce-scatters do. Where every rank has all of a parameter, and updates its own shard only, the
    fetch starts to gather what other ranks updated.
    """
    collectives = []
    for event in schedule.events:
        tile = schedule.tiles[event.tile]
        alone = tile.activation or tile.ranks * tile.replicas == 1
        refreshes = event.kind == "fetch" and tile.ranks > 1 and not tile.partitioned
        gathers = event.kind == "allgather" and tile.partitioned
        if not alone and (refreshes or gathers or event.kind == "reduce_scatter"):
            collectives.append(event)
    return collectives


def common_to_ranks(plan: Plan) -> list[str]:
    """All that the ranks have to have in common, one thing a line: versions, options, and the collectives that don't
    depend on what happened before, with their parameters."""
    made_with = [] if plan.fingerprint is None else [f"torch {plan.fingerprint.torch}, {plan.fingerprint.zinf_fx}"]
    options = [
        f"the option {name}={json.dumps(value)}" for name, value in encode(plan.config).items() if name not in _OWN
    ]
    planned = [
        (schedule, event)
        for schedule in plan.graphs
        for event in collectives_in(schedule)
        if event.kind != "fetch"  # which depends on what other ranks have updated
    ]
    tiles = dict.fromkeys(schedule.tiles[event.tile] for schedule, event in planned)
    parameters = [f"the parameter {tile.label}, {json.dumps(encode(tile))}" for tile in tiles]
    return [*made_with, *options, *parameters, *(_line(schedule, event) for schedule, event in planned)]


# Options that ranks may decide by the sizes of their batches: what follows from them is among the collectives.
_OWN = frozenset({"micro_batches", "micro_batch_group"})
_NAMES = {"allgather": "all-gather", "reduce_scatter": "reduce-scatter"}


def _line(schedule: GraphSchedule, event: Event) -> str:
    label = schedule.tiles[event.tile].label
    when = "for backward" if event.for_backward else ""
    stays = "in place" if event.resident else ""
    details = "".join(f", {detail}" for detail in (when, stays) if detail)
    return f"{schedule.kind}: the {_NAMES[event.kind]} of {label}{details}"
