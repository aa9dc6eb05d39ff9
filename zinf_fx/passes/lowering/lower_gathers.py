"""gather -> fetch, upload, allgather, wait at the first use, and release after the last."""

from __future__ import annotations

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.aliases import aliases_of, readers_of
from zinf_fx.passes.ir.framework import (
    OPERATOR,
    GraphContext,
    Pass,
    TileKey,
    events_in,
    give_event,
    key_of,
    nodes_calling,
    operator_of,
    start_argument,
)
from zinf_fx.passes.ir.rewriting import emit

# What gradients go to: they are looked at until they are on their tier.
_LEAVE = (ops.reduce_scatter, ops.together)


class LowerGathers(Pass):
    """Make the live ranges of each tile explicit: one per tile and graph, however often the tile is used; one per
    operator that uses it, where tiles come anew (`GraphContext.comes_anew`).

    The tile is released after the last use of it or of any alias of it. What would alias a tile and outlive it, a
    result of the graph or a gradient on its way to its tier, is cloned first.
    """

    name = "lower_gathers"
    requires = ("operators",)
    provides = ("lowered",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        first: dict[TileKey, fx.Node] = {}
        live_ranges: list[fx.Node] = []
        for gather in nodes_calling(graph, ops.gather):
            key = key_of(gather)
            if key in first and (not context.comes_anew(key.token) or _is_there(first[key], gather)):
                gather.replace_all_uses_with(first[key])
                graph.erase_node(gather)
            else:
                first[key] = gather
                live_ranges.append(gather)
        output = graph.output_node()
        for gather in live_ranges:
            if gather.users:
                _lower(graph, gather, output)
            else:
                graph.erase_node(gather)
        for node in events_in(graph):
            give_event(node, context, operator_of(node))
        return context


def _lower(graph: fx.Graph, gather: fx.Node, output: fx.Node) -> None:
    """Make one live range of a tile."""
    token, start = gather.args[0], start_argument(key_of(gather))
    operator = {OPERATOR: operator_of(gather)}
    with graph.inserting_before(gather):
        for transfer in ops.TRANSFERS:
            graph.call_function(transfer, (token,), start).meta = dict(operator)
    gather.target = ops.wait

    for alias in aliases_of(gather):
        leaving = [user for user in alias.users if user is output or user.target in _LEAVE]
        if leaving:
            with graph.inserting_after(alias):
                clone = emit(alias, torch.ops.aten.clone.default, alias)
            for user in leaving:
                user.replace_input_with(alias, clone)
    last = _last_use(gather)
    with graph.inserting_after(last):
        graph.call_function(ops.release, (token,), start).meta = {OPERATOR: operator_of(last)}


def _is_there(gathered: fx.Node, gather: fx.Node) -> bool:
    """Whether what was gathered before is there yet: until the operator of its last use."""
    return operator_of(gather) <= operator_of(_last_use(gathered))


def _last_use(gathered: fx.Node) -> fx.Node:
    """The last node that looks at a tile. What leaves the graph is a clone."""
    readers = (n for n in readers_of(gathered) if n.op != "output" and n.target not in _LEAVE)
    return max(readers)  # compared by position
