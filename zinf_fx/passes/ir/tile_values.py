"""Which nodes are nothing but tiles, looked at, copied or dequantised: to be repeated with the gathers before them."""

from __future__ import annotations

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.aliases import is_view_node

# Not views, but nothing that saves anything either: a quantised weight's values, autocast's cast, fused projections.
_COPIES = {
    ops.dequantize,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.stack.default,
}


def tile_values(graph: fx.Graph) -> dict[fx.Node, None]:
    """The gathers, and the views and copies that depend on no other tensor, in graph order."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.target is ops.gather:
            found[node] = None
        elif node.target in _COPIES or is_view_node(node):
            inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (torch.Tensor, list, tuple))]
            if inputs and all(n in found for n in inputs):
                found[node] = None
    return found
