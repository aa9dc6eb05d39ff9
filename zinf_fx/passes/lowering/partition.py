"""Joint graph -> forward graph and backward graph, by PyTorch's min-cut partitioner."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.ir.collectives import is_collective
from zinf_fx.passes.ir.framework import GraphContext, results_of
from zinf_fx.passes.ir.rewriting import without_code
from zinf_fx.passes.ir.tile_values import tile_values
from zinf_fx.passes.lowering.written_inputs import place_snapshots


def partition(
    joint: fx.GraphModule, joint_inputs: Any, context: GraphContext, **arguments: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split `joint` by its tags. Raises: PlanError if a value of a tile, or what is not there yet, would be saved for
    backward."""
    forward, backward = map(without_code, min_cut_rematerialization_partition(joint, joint_inputs, **arguments))
    saved = set(results_of(forward.graph)[arguments["num_fwd_outputs"] :])
    place_snapshots(forward.graph, [node for node in saved if isinstance(node, fx.Node)])
    for node in filter(is_collective, saved):
        raise PlanError(
            f"partition would save {node.format_node()} for backward, which is still under way; what waits for it must "
            "be saved instead"
        )
    for node in tile_values(forward.graph):
        if node in saved:
            tiles = " and ".join(f"'{context.tile_of(gather).label}'" for gather in _gathers_of(node))
            raise PlanError(
                f"partition would save the value of {tiles} for backward ({node.format_node()}); it must be gathered "
                "again, which pass 'recompute_gathers' sees to"
            )
    return forward, backward


def _gathers_of(node: fx.Node) -> list[fx.Node]:
    """The gathers that a tile value was made from."""
    if node.target is ops.gather:
        return [node]
    return list(dict.fromkeys(gather for argument in node.all_input_nodes for gather in _gathers_of(argument)))
