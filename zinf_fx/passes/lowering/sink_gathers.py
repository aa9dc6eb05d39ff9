"""Gathers move down to where they are needed, so that no tile is held before its first use."""

from __future__ import annotations

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.framework import GraphContext, Pass, nodes_calling
from zinf_fx.passes.ir.tile_values import tile_values


class SinkGathers(Pass):
    """Put each gather, and the views and copies of it, before the first node that computes with them.

    A model that lists its weights first and uses them later would otherwise hold all of them at once. Where tiles come
    anew (`GraphContext.comes_anew`), each use gets a gather of its own.
    """

    name = "sink_gathers"
    provides = ("gathers_sunk",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        for token in nodes_calling(graph, ops.pack):  # transfers begin in the prologue
            max(graph.find_nodes(op="placeholder")).append(token)
        _gather_for_each_use(graph, context)
        order = {node: position for position, node in enumerate(graph.nodes)}
        place: dict[fx.Node, fx.Node] = {}  # tile value -> the first node that computes with it
        front: dict[fx.Node, fx.Node] = {}  # that node -> the first of the tile values already put before it
        for value in reversed(tile_values(graph)):
            if value.users:
                place[value] = user = min((place.get(user, user) for user in value.users), key=order.__getitem__)
                front.setdefault(user, user).prepend(value)
                front[user] = value
        return context


def _gather_for_each_use(graph: fx.Graph, context: GraphContext) -> None:
    """Give each user of a tile that comes anew a gather, and views and copies, of its own."""
    values = tile_values(graph)
    anew: set[fx.Node] = set()
    for value in values:
        source = value.all_input_nodes[0]
        if source in anew or (value.target is ops.gather and context.comes_anew(source.name)):
            anew.add(value)
    for value in reversed(values):
        for user in list(value.users)[1:] if value in anew else ():
            with graph.inserting_before(value):
                user.replace_input_with(value, graph.node_copy(value))
