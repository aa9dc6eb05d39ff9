"""Joint graph -> forward graph and backward graph, by PyTorch's min-cut partitioner."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.framework import GraphContext, nodes_calling


def partition(
    joint: fx.GraphModule, joint_inputs: Any, context: GraphContext, **arguments: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split `joint` by its tags. Raises: PlanError if a value of a tile would be saved for backward."""
    forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **arguments)
    output = next(iter(forward.graph.find_nodes(op="output")))
    saved = output.args[0][arguments["num_fwd_outputs"] :]
    for node in nodes_calling(forward.graph, ops.gather):
        if node in saved:
            raise PlanError(
                f"partition would save the full value of '{context.tile_of(node).name}' for backward ({node.name}); "
                "it must be gathered again"
            )
    return forward, backward
