"""Saved activations: what eager PyTorch saves is saved; what the user's checkpointing recomputes is recomputed.

The min-cut partitioner would recompute pointwise operations, which pays only where a compiler fuses them.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx.passes.ir.framework import GraphContext, Pass, is_compute


class KeepActivations(Pass):
    """Tag every operation that carries no decision of the user's `torch.utils.checkpoint` as saved."""

    name = "keep_activations"
    provides = ("activations",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        for node in graph.nodes:
            if is_compute(node) and "recompute" not in node.meta:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return context
