"""Gradient shards leave for their tier; autograd gets None for them (ZeRO-Infinity, section 5.1)."""

from __future__ import annotations

import operator

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.aliases import aliases_of, memory_node
from zinf_fx.passes.ir.framework import GraphContext, Pass, give_event, operand, operator_of, results_of, start_argument
from zinf_fx.passes.ir.gradient_parts import assembly_of, gradient_outputs, parts_of
from zinf_fx.passes.ir.rewriting import set_results


class OffloadGradients(Pass):
    """Follow each reduce-scatter by an offload, and make the output that it was, or was part of, None."""

    name = "offload_gradients"
    requires = ("operators", "gradients_reduced")
    provides = ("gradients_offloaded",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        results = results_of(graph)
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


def gradients_left_alone(graph: fx.Graph) -> frozenset[int]:
    """The tiles whose gradients nobody but their parameter has any part of once a lowered graph has computed them."""
    offloads = graph.find_nodes(op="call_function", target=ops.offload)
    return frozenset(node.meta[ops.EVENT].tile for node in offloads if _is_left_alone(operand(operand(node, 1), 1)))


def _is_left_alone(gradient: fx.Node) -> bool:
    """Whether nothing but its reduction has to do with the memory of a gradient, so that it may be kept as it is.

    An operator of PyTorch's own has made it, for this purpose alone, and as large as it is.
    """
    memory = memory_node(gradient)
    maker = operand(memory) if memory.target is operator.getitem else memory
    if not isinstance(maker.target, torch._ops.OpOverload) or maker.target.namespace != "aten":
        return False
    aliases = set(aliases_of(memory))
    users = [user for alias in aliases for user in alias.users if user not in aliases]
    if maker.target._schema.is_mutable or [user.target for user in users] != [ops.reduce_scatter]:
        return False
    made, value = memory.meta["val"], gradient.meta["val"]
    return value.is_contiguous() and made.numel() == value.numel()
