"""The passes in their order, with the specification checked after each."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.errors import BudgetError, PlanError
from zinf_fx.passes.activations.choices import choices_in, tagged
from zinf_fx.passes.activations.choose import ChooseActivations
from zinf_fx.passes.activations.keep import KeepActivations
from zinf_fx.passes.activations.offload import (
    OffloadActivations,
    ReloadActivations,
    bytes_of,
    leaving,
    saved_activations,
)
from zinf_fx.passes.activations.recompute import RecomputeActivations
from zinf_fx.passes.ir import spec
from zinf_fx.passes.ir.framework import (
    MADE_BY,
    GraphContext,
    HeadTransfer,
    Pass,
    event_of,
    events_in,
    is_compute,
    nodes_calling,
    operator_of,
)
from zinf_fx.passes.ir.printer import print_graph
from zinf_fx.passes.ir.rewriting import copied
from zinf_fx.passes.ir.work import total, work_of
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.offload_gradients import OffloadGradients
from zinf_fx.passes.lowering.parameter_writes import PlaceWrites
from zinf_fx.passes.lowering.partition import partition
from zinf_fx.passes.lowering.recompute_gathers import RecomputeGathers
from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.scheduling.buffers import excess, place
from zinf_fx.passes.scheduling.prefetch import Prefetch
from zinf_fx.passes.scheduling.refusal import refusal_of_buffers
from zinf_fx.passes.scheduling.residency import choose
from zinf_fx.passes.tiling.tile import TileParameters
from zinf_fx.passes.tiling.tile_cross_entropy import TileCrossEntropy
from zinf_fx.plan.memory.spec import check_buffers
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphSchedule, Operator
from zinf_fx.plan.spec import check_schedule
from zinf_fx.sizes import PAGE

log = logging.getLogger(__name__)

# A tile and its gradient may be there together, and the next tile and the gradient before it.
_TILES_TOGETHER = 4
# Parts of the budget that the largest tile may be, tried in this order until the plan fits, down to a page.
_TILES_IN_BUDGET = (2, 4, 8, 16, 32, 64)
# How often less may stay in memory, so that buffers find places within the budget, before nothing does.
_TRIES = 4


def plan_training(
    joint: fx.GraphModule, joint_inputs: Any, context: GraphContext, **arguments: Any
) -> tuple[fx.GraphModule, GraphContext, fx.GraphModule, GraphContext]:
    """Joint graph -> planned forward and backward graphs with their contexts.

    `context.gradients` is keyed by the position of the gradient among the outputs of the backward graph. `arguments`
    are those of PyTorch's partitioner.
    """
    for limit, last in _tile_limits(context):
        graph = joint if last else fx.GraphModule(joint, copied(joint.graph))
        try:
            return _plan_training(graph, joint_inputs, replace(context, provided=frozenset()), limit, arguments)
        except BudgetError:
            if last:
                raise
    raise AssertionError("unreachable")


def _tile_limits(context: GraphContext) -> Iterator[tuple[int | None, bool]]:
    """The tile limits to plan with (None: no tiling) until the plan fits the budget, and which is the last."""
    budget, tile = context.limit, context.config.tile
    if tile != "auto" or budget is None or budget <= 0:
        yield (None if tile == "auto" else tile), True
        return
    limits = [None, *(budget // divisor for divisor in _TILES_IN_BUDGET if budget // divisor >= PAGE)]
    yield from ((limit, limit is limits[-1]) for limit in limits)


def tiling(limit: int | None) -> list[Pass]:
    """The passes that divide what is larger than so many bytes."""
    return [] if limit is None else [TileParameters(limit), TileCrossEntropy()]


def _activations(context: GraphContext, tile_limit: int | None) -> Pass:
    """The pass for the policy in force."""
    config = context.config
    if isinstance(config.activations, int):
        return RecomputeActivations(config.activations)
    if config.activations == "auto":
        return ChooseActivations(_room_for_activations(context, tile_limit), context.rates)
    return RecomputeActivations() if config.activations == "recompute" else KeepActivations()


def _room_for_activations(context: GraphContext, tile_limit: int | None) -> int | None:
    """What of the device's budget the states that live there and the tiles in flight leave; None: there is no budget.

    Tiles get what `_TILES_TOGETHER` of the largest take, and at least a quarter.
    """
    budget = context.config.device_memory
    if budget is None:
        return None
    moved = [tile.gathered_nbytes for tile in context.tiles.values() if tile.needs_buffer]
    largest = min(max(moved, default=0), budget if tile_limit is None else tile_limit)
    return max(budget - context.living_on_device.total - max(_TILES_TOGETHER * largest, budget // 4), 0)


def _plan_training(
    joint: fx.GraphModule, joint_inputs: Any, context: GraphContext, tile_limit: int | None, arguments: dict[str, Any]
) -> tuple[fx.GraphModule, GraphContext, fx.GraphModule, GraphContext]:
    activations = _activations(context, tile_limit)
    forward, forward_context, backward, backward_context = divided_training(
        joint, joint_inputs, context, tile_limit, activations, arguments
    )
    # Backward first: forward has to start what backward needs at its head.
    backward_context, head = _schedule(backward.graph, backward_context, [OffloadGradients()])
    forward_context, _ = _schedule(forward.graph, replace(forward_context, successor_head=head), [])
    contexts = _place_buffers([(forward, forward_context), (backward, backward_context)])
    return forward, contexts[0], backward, contexts[1]


def divided_training(
    joint: fx.GraphModule,
    joint_inputs: Any,
    context: GraphContext,
    tile_limit: int | None,
    activations: Pass,
    arguments: dict[str, Any],
) -> tuple[fx.GraphModule, GraphContext, fx.GraphModule, GraphContext]:
    """Joint graph -> forward and backward graphs that are to be scheduled, with their contexts.

    What is saved, recomputed and leaves the device is as the pass `activations` says.
    """
    context = run_passes(joint.graph, replace(context, divided={}, undivided={}), tiling(tile_limit))
    before = tagged(joint.graph)
    context = run_passes(joint.graph, context, [activations])
    choices = choices_in(joint.graph, before)
    context = run_passes(joint.graph, context, [RecomputeGathers(), ReduceGradients()])
    forward, backward = partition(joint, joint_inputs, context, **arguments)
    tier = context.config.activation_tier
    movable, fixed = saved_activations(forward.graph, arguments["num_fwd_outputs"])
    leave = leaving(movable, fixed, tier, context.tensor_ranks)
    both = replace(
        context,
        backward_outputs=0,
        provided=frozenset(),
        kept=bytes_of(movable) - bytes_of(leave) + bytes_of(fixed),
        tile_limit=tile_limit,
        choices=choices,
    )
    forward_context = replace(both, kind="forward", gradients={})
    backward_context = replace(both, kind="backward", provided=frozenset({"gradients_reduced"}))
    forward_context = run_passes(forward.graph, forward_context, [OffloadActivations(leave)])
    backward_context = run_passes(backward.graph, backward_context, [ReloadActivations(leave)])
    return forward, forward_context, backward, backward_context


def plan_inference(module: fx.GraphModule, context: GraphContext) -> GraphContext:
    """Plan a graph that has no backward."""
    captured = module.graph
    for limit, last in _tile_limits(context):
        if not last:
            module.graph = copied(captured)
        tried = replace(context, divided={}, undivided={}, provided=frozenset(), tile_limit=limit)
        try:
            tried = run_passes(module.graph, tried, tiling(limit))
            tried, _ = _schedule(module.graph, tried, [])
            return _place_buffers([(module, tried)])[0]
        except BudgetError:
            if last:
                raise
            module.graph = captured
    raise AssertionError("unreachable")


def _schedule(
    graph: fx.Graph, context: GraphContext, extra: Sequence[Pass]
) -> tuple[GraphContext, tuple[HeadTransfer, ...]]:
    """Schedule one graph; returns what it needs at its head, too."""
    prefetch = Prefetch(context.config.prefetch)
    context = run_passes(graph, context, [*lowering(), *extra, prefetch])
    return context, prefetch.head(graph, context)


def lowering() -> list[Pass]:
    """The passes that make operators, and what each tile's journey consists of."""
    return [PlaceWrites(), SinkGathers(), Regions(), LowerGathers()]


def _place_buffers(modules: Sequence[tuple[fx.GraphModule, GraphContext]]) -> list[GraphContext]:
    """What stays in memory between uses, in the scheduled graphs of one step, and where every buffer lies.

    Less stays where buffers would not find places within the budget. Raises: BudgetError when they don't even if
    nothing stays.
    """
    scheduled = [(module.graph, context) for module, context in modules]
    limit, is_limited = scheduled[0][1].limit, scheduled[0][1].is_limited
    spare = 0
    for left in reversed(range(_TRIES + 1)):
        for (module, _), (graph, _) in zip(modules, scheduled, strict=True):
            module.graph = copied(graph) if is_limited else graph
        graphs = [(module.graph, context) for module, context in modules]
        graphs = _run_each(graphs, choose(graphs, spare))
        graphs = _run_each(graphs, place(plan_of(graphs)))
        plan = plan_of(graphs)
        check_schedule(plan.graphs)
        check_buffers(plan)
        over = excess(plan)
        if over <= 0:
            break
        if not left:
            raise BudgetError(refusal_of_buffers(plan, graphs[-1][1]))
        spare = spare + over if left > 1 else limit
    for module, _ in modules:
        module.recompile()
    return [context for _, context in graphs]


def _run_each(
    graphs: Sequence[tuple[fx.Graph, GraphContext]], passes: Sequence[Pass]
) -> list[tuple[fx.Graph, GraphContext]]:
    """Run a pass on each graph."""
    return [(graph, run_passes(graph, context, [each])) for (graph, context), each in zip(graphs, passes, strict=True)]


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
    for each in passes:
        if missing := set(each.requires) - context.provided:
            raise PlanError(f"pass '{each.name}' requires {sorted(missing)}, which no pass before it provides")
        started = time.perf_counter()
        context = each(graph, context)
        seconds = time.perf_counter() - started
        context = replace(context, provided=context.provided | frozenset(each.provides))
        for node in graph.nodes:
            if targets.get(node) is not node.target:
                targets[node] = node.target
                node.meta[MADE_BY] = each.name
        graph.lint()
        spec.check(graph, context, placeholders, each.name)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("after %s (%.1f ms):\n%s", each.name, seconds * 1e3, print_graph(graph, context))
    return context


def schedule_of(graph: fx.Graph, context: GraphContext) -> GraphSchedule:
    """The schedule of a planned graph: its events are those that the graph's nodes carry."""
    events = tuple(map(event_of, events_in(graph)))
    separate = any(has_own_memory(node.args[3]) for node in nodes_calling(graph, ops.wait))
    compute: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_compute(node):
            compute.setdefault(operator_of(node), []).append(node)
    count = 1 + max((*compute, *(e.operator for e in events)), default=0)
    operators = [_operator(i, compute.get(i, [])) for i in range(count)]
    return GraphSchedule(context.kind, context.table, tuple(operators), events, separate)


def has_own_memory(device: torch.device) -> bool:
    """Whether what computes on the device computes in its own memory, to which tiles are copied."""
    return device.type != "cpu"


def _operator(index: int, nodes: list[fx.Node]) -> Operator:
    work = total([work_of(node) for node in nodes])
    return Operator(index, _label(nodes), len(nodes), *work)


_HEAVY = ("mm", "conv", "attention", "embedding", "linear")


def _label(nodes: list[fx.Node]) -> str:
    """What a region computes, in few words: its heavy operations, or else its first."""
    names = [getattr(n.target, "_opname", getattr(n.target, "__name__", str(n.target))) for n in nodes]
    heavy = list(dict.fromkeys(n for n in names if any(part in n for part in _HEAVY)))
    return ", ".join(heavy or names[:1])
