"""No weight is saved for backward: backward gathers it again (ZeRO stage 3; ZeRO-Infinity, section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx import ops
from zinf_fx.passes.aliases import aliased_inputs
from zinf_fx.passes.framework import GraphContext, nodes_calling

# Not views, but as cheap to repeat as the gather that they follow (autocast's cast of a weight).
_CASTS = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}


@dataclass(frozen=True)
class RecomputeGathers:
    """Tag each gather, and the views and casts that depend on nothing else, to be repeated in backward."""

    name: ClassVar[str] = "recompute_gathers"
    requires: ClassVar[tuple[str, ...]] = ("activations",)
    provides: ClassVar[tuple[str, ...]] = ("gathers_recomputed",)
    changes_numerics: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        chain = set(nodes_calling(graph, ops.gather))
        for node in graph.nodes:
            inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (torch.Tensor, list, tuple))]
            repeats = node.op == "call_function" and (node.target in _CASTS or bool(aliased_inputs(node)))
            if repeats and inputs and chain.issuperset(inputs):
                chain.add(node)
        for node in chain:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            # Without this key the partitioner doesn't take a gather for the border of a checkpointed region,
            # whose last value it would save.
            node.meta.pop("ac_graph_id", None)
