"""Gradients of stored parameters are reduce-scattered as soon as they are final (ZeRO-Infinity, section 6.2)."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.framework import GraphContext, Pass, results_of, start_argument, tokens_in
from zinf_fx.passes.ir.gradient_parts import GradientPart, gradient_outputs, parts_of
from zinf_fx.passes.ir.rewriting import set_results


class ReduceGradients(Pass):
    """Put a reduce-scatter between each gradient of a stored parameter and the output that it is.

    This is done on the joint graph, so that the partitioner hands the tokens of all trainable tiles to the backward
    graph, of those too that backward doesn't gather (biases, embeddings).
    """

    name = "reduce_gradients"
    provides = ("gradients_reduced",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        tokens = tokens_in(graph)
        results = results_of(graph)
        first_gradient = len(results) - context.backward_outputs
        gradients = gradient_outputs(graph, context)
        context = replace(context, gradients={p: t for p, t in context.gradients.items() if p in gradients})
        for position, token in context.gradients.items():
            for part in parts_of(gradients[position], token, context):
                shard = self._reduce(graph, tokens[token], part)
                if part.whole is None:
                    results[first_gradient + position] = shard
                else:
                    part.whole.replace_input_with(part.node, shard)
        set_results(graph, results)
        return context

    def _reduce(self, graph: fx.Graph, token: fx.Node, part: GradientPart) -> fx.Node:
        last_input = next(reversed(graph.find_nodes(op="placeholder")))
        with graph.inserting_after(part.node if part.node.op != "placeholder" else last_input):
            shard = graph.call_function(ops.reduce_scatter, (token, part.node), start_argument(part.key))
        shard.meta["val"] = part.node.meta.get("val")
        # Without it, a gradient that depends on no tangent would be reduced in forward.
        shard.meta["partitioner_tag"] = "must_be_in_backward"
        return shard
