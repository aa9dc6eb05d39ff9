"""Gradient shards leave for their tier; autograd gets None for them (ZeRO-Infinity, section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.framework import OPERATOR, GraphContext, operator_of


@dataclass(frozen=True)
class OffloadGradients:
    """Follow each reduce-scatter by an offload, and make the output that it was None."""

    name: ClassVar[str] = "offload_gradients"
    requires: ClassVar[tuple[str, ...]] = ("operators", "gradients_reduced")
    provides: ClassVar[tuple[str, ...]] = ("gradients_offloaded",)
    changes_numerics: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        output = next(iter(graph.find_nodes(op="output")))
        results = list(output.args[0])
        for position, shard in enumerate(results):
            if shard is None or shard.target is not ops.reduce_scatter:
                continue
            with graph.inserting_after(shard):
                offload = graph.call_function(ops.offload, (shard.args[0], shard))
            offload.meta[OPERATOR] = operator_of(shard)
            results[position] = None
        output.args = (type(output.args[0])(results),)
