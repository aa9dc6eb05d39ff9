"""Change the batch of a plan that is simulated."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction

from zinf_fx.errors import PlanError
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Operator, Tile


def batch_of(plan: Plan) -> int:
    """Return the batch of a plan: the first dimension of all tensors that the model is called with. Its buffers, which
    are inputs of the graph too, don't count. Raises: PlanError where the tensors have none in common."""
    lines = plan.fingerprint.lines if plan.fingerprint is not None else ()
    shapes = [matched[1] for line in lines if (matched := re.match(r"input \d+: \w+\[(\d{1,18})\b", line))]
    if len(set(shapes)) != 1 or int(shapes[0]) < 1:
        dimensions = ", ".join(sorted(set(shapes))) or "none"
        raise PlanError(f"the batch of the plan's inputs is not known: their first dimensions are {dimensions}")
    return int(shapes[0])


def with_batch(plan: Plan, batch: int | Fraction) -> Plan:
    """Return the plan as it would be for another batch, for a simulation: compute and activations grow with the batch,
    and the schedule stays as it is. A fraction is a batch on average."""
    factor = Fraction(batch, batch_of(plan))
    graphs = tuple(
        replace(
            graph,
            operators=tuple(_operator_with(operator, factor) for operator in graph.operators),
            tiles=tuple(_tile_with(tile, factor) for tile in graph.tiles),
        )
        for graph in plan.graphs
    )
    return replace(plan, kept=int(plan.kept * factor), graphs=graphs)


def _operator_with(operator: Operator, factor: Fraction) -> Operator:
    sizes = {
        name: int(getattr(operator, name) * factor) for name in ("flops", "product_bytes", "other_bytes", "values")
    }
    return replace(operator, **sizes)


def _tile_with(tile: Tile, factor: Fraction) -> Tile:
    if not tile.activation:
        return tile
    return replace(tile, shape=(int(tile.shape[0] * factor), *tile.shape[1:]), shard=math.ceil(tile.shard * factor))
