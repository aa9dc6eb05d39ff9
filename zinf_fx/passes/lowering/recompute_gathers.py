"""No weight is saved for backward: backward gathers it again (ZeRO stage 3; ZeRO-Infinity, section 5.1)."""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx.passes.ir.framework import GraphContext, Pass
from zinf_fx.passes.ir.tile_values import tile_values


class RecomputeGathers(Pass):
    """Tag each gather, and the views and copies that depend on nothing else, to be repeated in backward."""

    name = "recompute_gathers"
    requires = ("activations",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        for node in tile_values(graph):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            # Without this key the partitioner doesn't take a gather for the border of a checkpointed region,
            # whose last value it would save.
            node.meta.pop("ac_graph_id", None)
        return context
