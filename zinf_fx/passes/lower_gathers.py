"""gather -> fetch, upload, allgather, wait at the first use, and release after the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.passes.aliases import aliases_of
from zinf_fx.passes.framework import OPERATOR, GraphContext, nodes_calling, operator_of


@dataclass(frozen=True)
class LowerGathers:
    """Make the journey of each tile explicit: one per tile and graph, however often the tile is used.

    The tile is released after the last use of it or of any alias of it. What would alias a tile and outlive it, a
    result of the graph or a gradient on its way to its tier, is cloned first.
    """

    name: ClassVar[str] = "lower_gathers"
    requires: ClassVar[tuple[str, ...]] = ("operators",)
    provides: ClassVar[tuple[str, ...]] = ("lowered",)
    changes_numerics: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        first: dict[fx.Node, fx.Node] = {}
        for gather in nodes_calling(graph, ops.gather):
            token = gather.args[0]
            if token in first:
                gather.replace_all_uses_with(first[token])
                graph.erase_node(gather)
            else:
                first[token] = gather
        output = next(iter(graph.find_nodes(op="output")))
        order = {node: position for position, node in enumerate(graph.nodes)}
        for token, gather in first.items():
            if not gather.users:
                graph.erase_node(gather)
                continue
            self._lower(graph, token, gather, output, order)

    def _lower(
        self, graph: fx.Graph, token: fx.Node, gather: fx.Node, output: fx.Node, order: dict[fx.Node, int]
    ) -> None:
        operator = {OPERATOR: operator_of(gather)}
        with graph.inserting_before(gather):
            for transfer in ops.TRANSFERS:
                graph.call_function(transfer, (token,)).meta = dict(operator)
        gather.target = ops.wait

        aliases = aliases_of(gather)
        for alias in aliases:
            leaving = [user for user in alias.users if user is output or user.target is ops.reduce_scatter]
            if leaving:
                self._clone_for(graph, alias, leaving)
        uses = {user for alias in aliases for user in (alias, *alias.users)}
        # A clone made above has no position of its own: it stands right behind what it copies.
        last = max(uses, key=lambda node: order.get(node, order.get(node.args[0], -1) + 0.5))
        with graph.inserting_after(last):
            graph.call_function(ops.release, (token,)).meta = {OPERATOR: operator_of(last)}

    def _clone_for(self, graph: fx.Graph, alias: fx.Node, users: list[fx.Node]) -> None:
        with graph.inserting_after(alias):
            clone = graph.call_function(torch.ops.aten.clone.default, (alias,))
        clone.meta = dict(alias.meta)
        if "val" in alias.meta:
            clone.meta["val"] = alias.meta["val"].clone()
        for user in users:
            user.replace_input_with(alias, clone)
