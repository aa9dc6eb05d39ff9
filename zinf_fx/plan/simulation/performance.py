"""What a simulation says of a plan on given hardware, in figures; and plans for other batches."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zinf_fx.errors import PlanError
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphSchedule, Operator, Tile
from zinf_fx.plan.simulation.event_graph import RESOURCES, Compute, Job, Resource
from zinf_fx.plan.simulation.operator_time import compute_seconds, flops_of
from zinf_fx.plan.simulation.simulate import Simulation, Stall, simulate, simulate_plan


@dataclass(frozen=True)
class Performance:
    """Of one step.

    Attributes:
        seconds: that it takes.
        flops: that one device does, recomputation included.
        utilisation: the share of the time that each resource works.
        critical: seconds of the critical path, by resource.
        stalled: seconds for which compute waited, by the resource that it waited for.
        stalls: all times for which it waited, the longest first.
    """

    seconds: float
    flops: int
    utilisation: dict[Resource, float]
    critical: dict[Resource, float]
    stalled: dict[Resource, float]
    stalls: tuple[Stall, ...]

    @property
    def flops_per_second(self) -> float:
        """Of one device."""
        return self.flops / self.seconds if self.seconds else 0.0


def performance_of(
    plan: Plan,
    hardware: Hardware,
    compute: Compute | None = None,
    run: Callable[[Sequence[Job]], Simulation] = simulate,
    overlap: bool = True,
) -> tuple[Performance, Simulation]:
    """Simulate a step.

    Args:
        compute: measured seconds of its operators; default what the hardware's figures say.
        run: how its jobs follow each other.
        overlap: the optimizer's step goes on in the next forward pass.

    Raises: PlanError for another number of ranks; ConfigError for a dtype without a peak.
    """
    if compute is None:
        compute = compute_seconds(plan, hardware)
    simulation = simulate_plan(plan, hardware, compute, run, overlap)
    stalled: Counter[Resource] = Counter()
    stalls = simulation.stalls()
    for stall in stalls:
        for job, seconds in stall.waited_for:
            stalled[job.resource] += seconds
    performance = Performance(
        simulation.seconds,
        flops_of(plan),
        simulation.utilisation,
        simulation.critical_seconds,
        {resource: stalled[resource] for resource in RESOURCES},
        tuple(sorted(stalls, key=lambda stall: -stall.seconds)),
    )
    return performance, simulation


def batch_of(plan: Plan) -> int:
    """The first dimension that all tensors have which the model is called with. Its buffers, which are inputs of the
    graph too, don't count. Raises: PlanError when they have none in common."""
    lines = plan.fingerprint.lines if plan.fingerprint is not None else ()
    shapes = [found[1] for line in lines if (found := re.match(r"input \d+: \w+\[(\d{1,18})\b", line))]
    if len(set(shapes)) != 1 or int(shapes[0]) < 1:
        found = ", ".join(sorted(set(shapes))) or "none"
        raise PlanError(f"the batch of the plan's inputs is not known: their first dimensions are {found}")
    return int(shapes[0])


def with_batch(plan: Plan, batch: int | Fraction) -> Plan:
    """The plan as it would be for another batch, for a simulation: computing, and activations, grow with it; the
    parameters' journeys and what is done when stay as they are. A fraction is a batch on average."""
    factor = Fraction(batch, batch_of(plan))
    return replace(
        plan, kept=int(plan.kept * factor), graphs=tuple(_graph_with(graph, factor) for graph in plan.graphs)
    )


def _graph_with(graph: GraphSchedule, factor: Fraction) -> GraphSchedule:
    return replace(
        graph,
        operators=tuple(_operator_with(one, factor) for one in graph.operators),
        tiles=tuple(_tile_with(tile, factor) for tile in graph.tiles),
    )


def _operator_with(operator: Operator, factor: Fraction) -> Operator:
    sizes = {name: int(getattr(operator, name) * factor) for name in ("flops", "product_bytes", "other_bytes")}
    return replace(operator, **sizes)


def _tile_with(tile: Tile, factor: Fraction) -> Tile:
    if not tile.activation:
        return tile
    return replace(tile, shape=(int(tile.shape[0] * factor), *tile.shape[1:]), shard=math.ceil(tile.shard * factor))
