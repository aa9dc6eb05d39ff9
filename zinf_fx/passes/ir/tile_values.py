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
    """The gathers, and the views and copies that depend on no other tensor, in graph order; and what makes values of
    codes: everything that is computed of tiles alone, if one of them has a dtype that is not trained."""
    values: dict[fx.Node, None] = {}
    codes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is ops.gather:
            values[node] = None
            if _is_of_codes(node.args[2]):
                codes.add(node)
            continue
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (torch.Tensor, list, tuple))]
        if not inputs or not all(n in values for n in inputs):
            continue
        of_codes = not codes.isdisjoint(inputs)
        if node.target in _COPIES or is_view_node(node) or (of_codes and _is_function(node)):
            values[node] = None
            if of_codes:
                codes.add(node)
    return values


def _is_of_codes(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of quantised weights."""
    return not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1


def _is_function(node: fx.Node) -> bool:
    """Whether a node computes the same of the same, and does nothing else."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
