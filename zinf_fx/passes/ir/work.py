"""How much a node computes: its floating point operations, and the bytes of memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, register_flop_formula

from zinf_fx import ops
from zinf_fx.passes.ir.aliases import is_view_node
from zinf_fx.passes.ir.framework import bytes_computed


@register_flop_formula(ops.quantised_mm.overloadpacket)
def _flops_of_product(left: torch.Size, *args: object, out_shape: torch.Size, **kwargs: object) -> int:
    return 2 * left.numel() * out_shape[1]


class Work(NamedTuple):
    """Of one or several nodes.

    `flops` of matrix products, convolutions and attention, by the formulas of `torch.utils.flop_counter`;
    `product_bytes` read and written by these; `other_bytes` by all others; `dtype` of most of the flops, None where
    there are none.
    """

    flops: int = 0
    product_bytes: int = 0
    other_bytes: int = 0
    dtype: torch.dtype | None = None


def work_of(node: fx.Node) -> Work:
    """The work of one node. A view has none; where a size is known at run time only, flops are not counted."""
    if is_view_node(node):
        return Work()
    nbytes = bytes_computed(node) + sum(map(bytes_computed, node.all_input_nodes))
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None or not all(_is_static(one) for one in (node, *node.all_input_nodes)):
        return Work(other_bytes=nbytes)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    flops = int(count(*args, **kwargs, out_val=node.meta["val"]))
    return Work(flops, product_bytes=nbytes, dtype=_tensors(node)[0].dtype) if flops else Work(other_bytes=nbytes)


def total(works: Iterable[Work]) -> Work:
    """Of several nodes together."""
    works = list(works)
    heaviest = max(works, key=lambda work: work.flops, default=Work())
    return Work(
        sum(work.flops for work in works),
        sum(work.product_bytes for work in works),
        sum(work.other_bytes for work in works),
        heaviest.dtype,
    )


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [one for one in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(one, torch.Tensor)]


def _is_static(node: fx.Node) -> bool:
    return all(isinstance(size, int) for tensor in _tensors(node) for size in tensor.shape)
