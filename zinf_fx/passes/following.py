"""Graphs planned as a plan file says, without deciding anything.

The passes that rewrite are those of planning. In place of those that search (which tiles are small enough, what is
saved, how early transfers start, what stays in memory, where buffers lie) stand passes that read the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from zinf_fx.errors import PlanError
from zinf_fx.passes.activations.choices import FollowActivations
from zinf_fx.passes.ir.framework import GraphContext, PrologueTransfer
from zinf_fx.passes.lowering.offload_gradients import OffloadGradients
from zinf_fx.passes.pipeline import Planned, computes_apart, divided_training, lowering, plan_of, run_passes, sizing
from zinf_fx.passes.scheduling.follow_schedule import FollowSchedule, check_items
from zinf_fx.passes.scheduling.prefetch import Prefetch
from zinf_fx.plan.memory.spec import check_buffers
from zinf_fx.plan.plan import Plan


def follow_training(
    joint: fx.GraphModule, joint_inputs: Any, context: GraphContext, plan: Plan, **arguments: Any
) -> tuple[Planned, Planned]:
    """What `plan_training` returned when it made `plan`. Raises: PlanError naming the first difference."""
    _check_device(plan, joint.graph)
    (forward, forward_context), (backward, context) = divided_training(
        joint, joint_inputs, context, plan.tile_limit, FollowActivations(plan.choices), arguments
    )
    steps = [*lowering(), OffloadGradients(), FollowSchedule(plan, "backward")]
    context = run_passes(backward.graph, context, steps)
    forward_context = replace(forward_context, successor_prologue=_prologue_due(plan, backward.graph, context))
    forward_context = run_passes(forward.graph, forward_context, [*lowering(), FollowSchedule(plan, "forward")])
    followed = (forward, forward_context), (backward, context)
    _check_followed(plan, followed)
    return followed


def follow_inference(module: fx.GraphModule, context: GraphContext, plan: Plan) -> GraphContext:
    """Do what `plan_inference` did when it made `plan`. Raises: PlanError naming the first difference."""
    _check_device(plan, module.graph)
    context = replace(context, tile_limit=plan.tile_limit)
    steps = [*sizing(module.graph, context.config, plan.tile_limit), *lowering(), FollowSchedule(plan, "inference")]
    context = run_passes(module.graph, context, steps)
    _check_followed(plan, [(module, context)])
    return context


def _check_device(plan: Plan, graph: fx.Graph) -> None:
    """Raises: PlanError where a plan is for a device of another kind than computes the graph, which would make other
    things differ, too."""
    if plan.has_own_memory != computes_apart(graph):
        whose = "its own" if plan.has_own_memory else "host memory"
        raise PlanError(f"the plan is for a device whose memory is {whose}, and this one's is not")


def _prologue_due(plan: Plan, backward: fx.Graph, context: GraphContext) -> tuple[PrologueTransfer, ...]:
    """What backward, scheduled, needs forward to start for its prologue: what doesn't stay for it anyway."""
    there = plan.lifetimes.kept_at_begin(1)
    prologue = Prefetch(context.config.prefetch).prologue(backward, context)
    return tuple(transfer for transfer in prologue if transfer.tile not in there)


def _check_followed(plan: Plan, modules: Sequence[Planned]) -> None:
    """Check that following a plan made what it says. Raises: PlanError naming the first difference."""
    made = plan_of([(module.graph, context) for module, context in modules])
    check_buffers(made)
    for theirs, ours in zip(plan.graphs, made.graphs, strict=True):
        for name in ("operators", "events"):
            check_items(f"the {theirs.kind} graph's {name}", getattr(theirs, name), getattr(ours, name))
    for name in ("gradient_buffer", "activation_buffer", "kept", "unmoved", "regions"):
        if getattr(plan, name) != getattr(made, name):
            raise PlanError(f"{name} of the plan is {getattr(plan, name)}, and that of the model {getattr(made, name)}")
    for module, _ in modules:
        module.recompile()
