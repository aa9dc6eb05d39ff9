"""Groups compute nodes into operators: the units of the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.aliases import is_view
from zinf_fx.passes.framework import OPERATOR, GraphContext, is_compute


@dataclass(frozen=True)
class Regions:
    """Number every node with its operator: a new one begins where a matrix is needed after something was computed.

    Views, and constants that depend on no input (positions, masks), are too little work to be an operator by
    themselves: they go with what follows.
    """

    name: ClassVar[str] = "regions"
    requires: ClassVar[tuple[str, ...]] = ("gathers_sunk",)
    provides: ClassVar[tuple[str, ...]] = ("operators",)
    changes_numerics: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        current, computed, gathered = 0, False, set()
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            if node.target is ops.gather:
                tile = context.tile_of(node)
                if computed and tile.opens_operator and tile.index not in gathered:
                    current, computed = current + 1, False
                gathered.add(tile.index)
            elif is_compute(node) and node.all_input_nodes and not is_view(node):
                computed = True
            node.meta[OPERATOR] = current
