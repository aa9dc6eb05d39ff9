"""No weight is saved for backward: backward gathers it again (ZeRO stage 3; ZeRO-Infinity, section 5.1)."""

from __future__ import annotations

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.framework import GraphContext, Pass, nodes_calling
from zinf_fx.passes.ir.rewriting import repeat_in_backward
from zinf_fx.passes.ir.tile_values import tile_values


class RecomputeGathers(Pass):
    """Tag each gather, and the views and copies that depend on nothing else, to be repeated in backward."""

    name = "recompute_gathers"
    requires = ("activations",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        for node in (*nodes_calling(graph, ops.pack), *tile_values(graph)):
            repeat_in_backward(node)
        return context
