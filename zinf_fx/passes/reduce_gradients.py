"""Gradients of stored parameters are reduce-scattered as soon as they are whole (ZeRO-Infinity, section 6.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.framework import GraphContext


@dataclass(frozen=True)
class ReduceGradients:
    """Put a reduce-scatter between each gradient of a stored parameter and the output that it is.

    This is done on the joint graph, so that the partitioner hands the tokens of all trainable tiles to the backward
    graph, of those too that backward doesn't gather (biases, embeddings).
    """

    name: ClassVar[str] = "reduce_gradients"
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ("gradients_reduced",)
    changes_numerics: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        output = next(iter(graph.find_nodes(op="output")))
        tokens = {node.name: node for node in graph.find_nodes(op="placeholder")}
        first_gradient = len(output.args[0]) - context.backward_outputs
        results = list(output.args[0])
        context.gradients = {p: t for p, t in context.gradients.items() if results[first_gradient + p] is not None}
        for position, token in context.gradients.items():
            gradient = results[first_gradient + position]
            after = gradient if gradient.op != "placeholder" else next(reversed(graph.find_nodes(op="placeholder")))
            with graph.inserting_after(after):
                shard = graph.call_function(ops.reduce_scatter, (tokens[token], gradient))
            shard.meta["val"] = gradient.meta.get("val")
            # Without it, a gradient that depends on no tangent would be reduced in forward.
            shard.meta["partitioner_tag"] = "must_be_in_backward"
            results[first_gradient + position] = shard
        output.args = (type(output.args[0])(results),)
