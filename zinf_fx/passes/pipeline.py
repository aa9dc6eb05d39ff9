"""The passes in their order, with the specification checked after each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.errors import BudgetError, PlanError
from zinf_fx.passes.activations.choices import choices_in, tagged
from zinf_fx.passes.activations.choose import ChooseActivations
from zinf_fx.passes.activations.keep import KeepActivations
from zinf_fx.passes.activations.offload import (
    OffloadActivations,
    ReloadActivations,
    saved_activations,
)
from zinf_fx.passes.activations.recompute import RecomputeActivations
from zinf_fx.passes.ir import spec
from zinf_fx.passes.ir.framework import (
    MADE_BY,
    GraphContext,
    Pass,
    PrologueTransfer,
    arguments_of,
    computing,
    event_of,
    events_in,
    nodes_calling,
)
from zinf_fx.passes.ir.gradient_parts import check_dense
from zinf_fx.passes.ir.printer import print_graph
from zinf_fx.passes.ir.rewriting import copied
from zinf_fx.passes.ir.values import values_by_operator
from zinf_fx.passes.ir.work import total, work_of
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.offload_gradients import OffloadGradients
from zinf_fx.passes.lowering.parameter_writes import PlaceWrites
from zinf_fx.passes.lowering.partition import partition
from zinf_fx.passes.lowering.quantised_products import MultiplyQuantised
from zinf_fx.passes.lowering.recompute_gathers import RecomputeGathers
from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.lowering.vertical import vertical
from zinf_fx.passes.scheduling.buffers import over_budget_by, place_buffers
from zinf_fx.passes.scheduling.prefetch import Prefetch
from zinf_fx.passes.scheduling.refusal import refusal_of_buffers
from zinf_fx.passes.scheduling.residency import choose_residency
from zinf_fx.passes.tiling.pack import PackParameters
from zinf_fx.passes.tiling.tile import TileParameters
from zinf_fx.passes.tiling.tile_cross_entropy import TileCrossEntropy
from zinf_fx.plan.memory.spec import check_buffers
from zinf_fx.plan.packs import has_own_memory, pack_limit
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphSchedule, Operator
from zinf_fx.plan.spec import check_schedule
from zinf_fx.sizes import PAGE, in_words

log = logging.getLogger(__name__)

T = TypeVar("T")

# A tile and its gradient may be there together, and the next tile and the gradient before it.
_TILES_TOGETHER = 4
# Parts of the budget that the largest tile may be, tried in this order until the plan fits, down to a page.
_TILES_IN_BUDGET = (2, 4, 8, 16, 32, 64)
# How often less may stay in memory, so that buffers find places within the budget, before nothing does.
_TRIES = 4


Planned = tuple[fx.GraphModule, GraphContext]


def plan_training(
    joint: fx.GraphModule, joint_inputs: Any, context: GraphContext, **arguments: Any
) -> tuple[Planned, Planned]:
    """Joint graph -> planned forward and backward graphs with their contexts.

    `context.gradients` is keyed by the position of the gradient among the outputs of the backward graph. `arguments`
    are those of PyTorch's partitioner.
    """
    check_dense(joint.graph, context)

    def plan(limit: int | None) -> tuple[Planned, Planned]:
        activations = _activations(context, limit)
        forward, backward = divided_training(joint, joint_inputs, context, limit, activations, arguments)
        # Backward first: forward has to start what backward needs in its prologue.
        backward, prologue = _schedule(*backward, OffloadGradients())
        forward, _ = _schedule(forward[0], replace(forward[1], successor_prologue=prologue))
        forward, backward = _with_buffers([forward, backward])
        return forward, backward

    return _within_budget(joint, context, plan)


def plan_inference(module: fx.GraphModule, context: GraphContext) -> GraphContext:
    """Plan a graph that has no backward."""

    def plan(limit: int | None) -> GraphContext:
        sizes = sizing(module.graph, context.config, limit)
        tiled = run_passes(module.graph, replace(context, tile_limit=limit), sizes)
        scheduled, _ = _schedule(module, tiled)
        ((_, planned),) = _with_buffers([scheduled])
        return planned

    return _within_budget(module, context, plan)


def _within_budget(module: fx.GraphModule, context: GraphContext, plan: Callable[[int | None], T]) -> T:
    """What `plan` makes of a captured module with the first tile limit (None: no tiling) that fits the budget."""
    captured = module.graph
    *limits, last = _tile_limits(context)
    for limit in limits:
        module.graph = copied(captured)
        with suppress(BudgetError):
            return plan(limit)
    module.graph = captured
    return plan(last)


def _tile_limits(context: GraphContext) -> list[int | None]:
    """The tile limits to plan with until the plan fits."""
    budget, tile = context.limit, context.config.tile
    if tile != "auto":
        return [tile]
    parts = [] if budget is None else [budget // divisor for divisor in _TILES_IN_BUDGET]
    return [None, *(limit for limit in parts if limit >= PAGE)]


def sizing(graph: fx.Graph, config: Config, limit: int | None) -> list[Pass]:
    """The passes that put together what is small, and divide what is larger than so many bytes."""
    pack = pack_limit(config, copied=computes_apart(graph))
    packing: list[Pass] = [] if pack is None else [PackParameters(pack if limit is None else min(pack, limit))]
    return packing if limit is None else [*packing, TileParameters(limit), TileCrossEntropy()]


def _activations(context: GraphContext, tile_limit: int | None) -> Pass:
    """The pass for the policy in force."""
    config = context.config
    if isinstance(config.activations, int):
        return RecomputeActivations(config.activations)
    if config.activations == "auto":
        return ChooseActivations(_room_for_activations(context, tile_limit), context.rates)
    return RecomputeActivations() if config.activations == "recompute" else KeepActivations()


def _room_for_activations(context: GraphContext, tile_limit: int | None) -> int | None:
    """What of the device's budget the states that live there and the tiles in flight leave, for each micro-batch; None:
    there is no budget.

    Tiles get what `_TILES_TOGETHER` of the largest take, and at least a quarter.
    """
    budget = context.config.device_memory
    if budget is None:
        return None
    moved = [tile.gathered_nbytes for tile in context.tiles.values() if tile.needs_buffer]
    largest = min(max(moved, default=0), budget if tile_limit is None else tile_limit)
    room = budget - context.living_on_device.total - max(_TILES_TOGETHER * largest, budget // 4)
    return max(room, 0) // context.config.micro_batch_count


def divided_training(
    joint: fx.GraphModule,
    joint_inputs: Any,
    context: GraphContext,
    tile_limit: int | None,
    activations: Pass,
    arguments: dict[str, Any],
) -> tuple[Planned, Planned]:
    """Joint graph -> forward and backward graphs that are to be scheduled, with their contexts.

    What is saved, recomputed and leaves the device is as the pass `activations` says.
    """
    context = run_passes(joint.graph, context, sizing(joint.graph, context.config, tile_limit))
    before = tagged(joint.graph)
    context = run_passes(joint.graph, context, [activations])
    choices = choices_in(joint.graph, before)
    context = run_passes(joint.graph, context, [RecomputeGathers(), ReduceGradients()])
    forward, backward = partition(joint, joint_inputs, context, **arguments)
    vertical(forward, backward, context, arguments["num_fwd_outputs"])
    leaving, kept = saved_activations(
        forward.graph, arguments["num_fwd_outputs"], context.config.activation_tier, context.tensor_ranks
    )
    if 0 < context.kept < kept:
        log.warning(
            f"a batch's activations take {in_words(kept)} of the device's memory, and the ranks divide device_memory "
            f"for {in_words(context.kept)}, the most of any rank's first batch: {in_words(kept - context.kept)} more "
            "than device_memory may be in use. Begin with the largest batch that comes"
        )
    context = replace(
        context,
        kind="backward",
        backward_outputs=0,
        provided=frozenset({"gradients_reduced"}),
        kept=context.kept or kept,
        tile_limit=tile_limit,
        choices=choices,
    )
    forward_context = replace(context, kind="forward", gradients={}, provided=frozenset())
    forward_context = run_passes(forward.graph, forward_context, [OffloadActivations(leaving)])
    backward_context = run_passes(backward.graph, context, [ReloadActivations(leaving)])
    return (forward, forward_context), (backward, backward_context)


def _schedule(
    module: fx.GraphModule, context: GraphContext, *extra: Pass
) -> tuple[Planned, tuple[PrologueTransfer, ...]]:
    """Schedule one graph; returns what it needs in its prologue, too."""
    prefetch = Prefetch(context.config.prefetch)
    context = run_passes(module.graph, context, [*lowering(), *extra, prefetch])
    return (module, context), prefetch.prologue(module.graph, context)


def lowering() -> list[Pass]:
    """The passes that make operators, and the live ranges of tiles."""
    return [PlaceWrites(), SinkGathers(), MultiplyQuantised(), Regions(), LowerGathers()]


def _with_buffers(scheduled: Sequence[Planned]) -> list[Planned]:
    """Decide what stays in memory between uses, in the scheduled graphs of one step, and where every buffer lies.

    Less stays where buffers would not find places within the budget. Raises: BudgetError when they don't even if
    nothing stays.
    """
    before = [module.graph for module, _ in scheduled]
    limit, is_limited = scheduled[0][1].limit, scheduled[0][1].is_limited
    spare, graphs = 0, []
    for left in reversed(range(_TRIES + 1)):
        for (module, _), graph in zip(scheduled, before, strict=True):
            if is_limited:
                module.graph = copied(graph)
        graphs = [(module.graph, context) for module, context in scheduled]
        graphs = _run_each(graphs, choose_residency(graphs, spare))
        graphs = _run_each(graphs, place_buffers(plan_of(graphs), graphs[0][1].rates))
        plan = plan_of(graphs)
        check_schedule(plan.graphs)
        check_buffers(plan)
        over = over_budget_by(plan)
        if over <= 0:
            break
        if not left:
            raise BudgetError(refusal_of_buffers(plan, graphs[-1][1]))
        assert limit is not None  # what exceeds a budget has one
        spare = spare + over if left > 1 else limit
    for module, _ in scheduled:
        module.recompile()
    return [(module, context) for (module, _), (_, context) in zip(scheduled, graphs, strict=True)]


def _run_each(
    graphs: Sequence[tuple[fx.Graph, GraphContext]], passes: Sequence[Pass]
) -> list[tuple[fx.Graph, GraphContext]]:
    """Run a pass on each graph."""
    return [(graph, run_passes(graph, context, [step])) for (graph, context), step in zip(graphs, passes, strict=True)]


def plan_of(graphs: Sequence[tuple[fx.Graph, GraphContext]]) -> Plan:
    """The plan that the scheduled graphs of a step stand for."""
    schedules = tuple(schedule_of(graph, context) for graph, context in graphs)
    first, last = graphs[0][1], graphs[-1][1]
    return Plan(
        schedules,
        last.config,
        max((tile.ranks * tile.replicas for tile in last.tiles.values() if not tile.activation), default=1),
        gradient_buffer=last.gradient_buffer,
        activation_buffer=first.activation_buffer,
        kept=last.kept,
        unmoved=last.unmoved,
        regions=last.regions,
        update=last.update,
        tile_limit=last.tile_limit,
        choices=last.choices,
    )


def run_passes(graph: fx.Graph, context: GraphContext, passes: Sequence[Pass]) -> GraphContext:
    """Run `passes` in order, checking what each requires and, after each, the specification.

    Returns what is known of the graph then. With the logger of this module at DEBUG, every pass says what it made of
    the graph, and how long that took.
    """
    placeholders = tuple(n.name for n in graph.find_nodes(op="placeholder"))
    targets = {node: node.target for node in graph.nodes}
    for step in passes:
        if missing := set(step.requires) - context.provided:
            raise PlanError(f"pass '{step.name}' requires {sorted(missing)}, which no pass before it provides")
        started = time.perf_counter()
        context = step(graph, context)
        seconds = time.perf_counter() - started
        context = replace(context, provided=context.provided | frozenset(step.provides))
        for node in graph.nodes:
            if targets.get(node) is not node.target:
                targets[node] = node.target
                node.meta[MADE_BY] = step.name
        graph.lint()
        spec.check(graph, context, placeholders, step.name)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("after %s (%.1f ms):\n%s", step.name, seconds * 1e3, print_graph(graph, context))
    return context


def computes_apart(graph: fx.Graph) -> bool:
    """Whether a graph computes with tiles in memory of a device's own."""
    return any(has_own_memory(arguments_of(node)[3].type) for node in nodes_calling(graph, ops.gather, ops.wait))


def schedule_of(graph: fx.Graph, context: GraphContext) -> GraphSchedule:
    """The schedule of a planned graph: its events are those that the graph's nodes carry."""
    events = tuple(map(event_of, events_in(graph)))
    separate = computes_apart(graph)
    compute, fused, values = computing(graph), context.config.compute == "inductor", values_by_operator(graph)
    operators = []
    for number in range(1 + max((*compute, *(event.operator for event in events)), default=0)):
        nodes = compute.get(number, [])
        work = total(map(work_of, nodes), fused)
        operators.append(Operator(number, _label(nodes), len(nodes), *work, values=values.get(number, 0)))
    return GraphSchedule(context.planned_kind, context.table, tuple(operators), events, separate)


_HEAVY = ("mm", "conv", "attention", "embedding", "linear", "dequantize")


def _label(nodes: list[fx.Node]) -> str:
    """What a region computes, in few words: its heavy operations, or else its first."""
    names = [getattr(n.target, "_opname", getattr(n.target, "__name__", str(n.target))) for n in nodes]
    heavy = list(dict.fromkeys(n for n in names if any(part in n for part in _HEAVY)))
    return ", ".join(heavy or names[:1])
