"""Groups compute nodes into operators: the units of the schedule."""

from __future__ import annotations

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.aliases import is_view_node
from zinf_fx.passes.ir.framework import GROUP, OPERATOR, GraphContext, Pass, is_compute, key_of
from zinf_fx.passes.ir.gradient_parts import assemblies
from zinf_fx.plan.schedule import PROLOGUE


class Regions(Pass):
    """Number every node with its operator: a new one begins where a matrix is needed after something was computed.

    Views, and constants that depend on no input (positions, masks), are too little work to be an operator by
    themselves: they go with what follows. A matrix that comes anew (`GraphContext.comes_anew`) begins an operator
    whenever it is needed, and the gradient of each of a parameter's tiles ends one. A group that all micro-batches run
    (see [Note: micro-batches]) is one operator.
    """

    name = "regions"
    requires = ("gathers_sunk",)
    provides = ("operators",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        current, computed, gathered, ended = 0, False, {}, False
        groups, group = _groups(graph), None  # `group`: that of the current operator, if it computes something of one
        put_together = assemblies(graph, context)
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            mine = groups.get(node)
            begins = group is None or mine != group  # where it may
            if node.target is ops.gather:
                tile, key = context.tile_of(node), key_of(node)
                known = gathered.get(key) == current if context.comes_anew(key.token) else key in gathered
                if begins and computed and tile.opens_operator and not known:
                    current, computed, ended, group = current + 1, False, False, None
                gathered[key] = current
            elif is_compute(node) and node.all_input_nodes and not is_view_node(node) and node not in put_together:
                if begins and ended:
                    current, ended = current + 1, False
                computed, group = True, mine
            elif node.target is ops.reduce_scatter and context.tile_of(node).rows is not None:
                ended = True
            node.meta[OPERATOR] = PROLOGUE if node.target is ops.pack else current
        return context


def _groups(graph: fx.Graph) -> dict[fx.Node, int]:
    """The group of each node from the first that is of one to the last."""
    last = {node.meta[GROUP]: node for node in graph.nodes if GROUP in node.meta}
    groups: dict[fx.Node, int] = {}
    group = None
    for node in graph.nodes if last else ():
        group = node.meta.get(GROUP, group)
        if group is not None:
            groups[node] = group
        if node is last.get(group):
            group = None
    return groups
