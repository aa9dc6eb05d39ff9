"""Gradient shards leave for their tier; autograd gets None for them (ZeRO-Infinity, section 5.1)."""

from __future__ import annotations

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.framework import GraphContext, Pass, give_event, operator_of, start_argument
from zinf_fx.passes.ir.gradient_parts import assembly_of, gradient_outputs, parts_of
from zinf_fx.passes.ir.rewriting import set_results


class OffloadGradients(Pass):
    """Follow each reduce-scatter by an offload, and make the output that it was, or was part of, None."""

    name = "offload_gradients"
    requires = ("operators", "gradients_reduced")
    provides = ("gradients_offloaded",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        results = list(graph.output_node().args[0])
        assembled: list[fx.Node] = []
        for position, gradient in gradient_outputs(graph, context).items():
            token = context.gradients[position]
            for part in parts_of(gradient, token, context):
                with graph.inserting_after(part.node):
                    offload = graph.call_function(ops.offload, (part.node.args[0], part.node), start_argument(part.key))
                give_event(offload, context, operator_of(part.node))
            assembled += assembly_of(gradient) if token in context.divided else ()
            results[position] = None
        set_results(graph, results)
        for node in assembled:  # the parts meet where gradients live
            graph.erase_node(node)
        return context
