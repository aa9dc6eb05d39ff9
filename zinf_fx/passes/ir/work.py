"""How much a node computes: its floating point operations, the bytes of memory that it reads and writes, and in how
many kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, register_flop_formula

from zinf_fx import ops
from zinf_fx.passes.ir.aliases import is_view_node
from zinf_fx.passes.ir.framework import bytes_computed, size_at_hand


@register_flop_formula(ops.quantised_mm.overloadpacket)
def _flops_of_product(left: torch.Size, *args: object, out_shape: torch.Size, **kwargs: object) -> int:
    return 2 * left.numel() * out_shape[1]


class Work(NamedTuple):
    """Of one or several nodes.

    `flops` of matrix products, convolutions and attention, by the formulas of `torch.utils.flop_counter`;
    `product_bytes` read and written by these; `other_bytes` by all others; `dtype` of most of the flops, None where
    there are none; `kernels` that a device is given, one by one.
    """

    flops: int = 0
    product_bytes: int = 0
    other_bytes: int = 0
    dtype: torch.dtype | None = None
    kernels: int = 0


def work_of(node: fx.Node) -> Work:
    """The work of one node, with the sizes at hand where they are symbolic. A view has none; where an operator will say
    a size at run time, flops are not counted."""
    if is_view_node(node):
        return Work()
    nbytes = bytes_computed(node) + sum(map(bytes_computed, node.all_input_nodes))
    other = Work(other_bytes=nbytes, kernels=int(_is_kernel(node)))
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None or not all(_has_size(one) for one in (node, *node.all_input_nodes)):
        return other
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: tree_map(_at_hand, n.meta["val"]))
    flops = int(count(*args, **kwargs, out_val=tree_map(_at_hand, node.meta["val"])))
    return Work(flops, product_bytes=nbytes, dtype=_tensors(node)[0].dtype, kernels=1) if flops else other


def total(works: Iterable[Work], fused: bool) -> Work:
    """Of several nodes together. `fused`: what is between two products is taken for one kernel, as a compiler of
    regions makes it at best."""
    works = list(works)
    heaviest = max(works, key=lambda work: work.flops, default=Work())
    return Work(
        sum(work.flops for work in works),
        sum(work.product_bytes for work in works),
        sum(work.other_bytes for work in works),
        heaviest.dtype,
        _kernels_fused(works) if fused else sum(work.kernels for work in works),
    )


def _kernels_fused(works: Sequence[Work]) -> int:
    of_kernels = [work for work in works if work.kernels]
    runs = groupby(of_kernels, key=lambda work: bool(work.flops))
    return sum(len(list(run)) if products else 1 for products, run in runs)


def _is_kernel(node: fx.Node) -> bool:
    """Whether the node makes, or changes, tensors: sizes are computed by the program."""
    if node.target in ops.NOT_COMPUTED or not isinstance(node.target, torch._ops.OperatorBase):
        return False
    schema = getattr(node.target, "_schema", None)
    return bool(_tensors(node)) or (schema is not None and schema.is_mutable)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [one for one in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(one, torch.Tensor)]


def _has_size(node: fx.Node) -> bool:
    return all(size_at_hand(size) is not None for tensor in _tensors(node) for size in tensor.shape)


def _at_hand(value: Any) -> Any:
    """A part of a node's result, with the sizes at hand."""
    if isinstance(value, torch.SymInt):
        return size_at_hand(value)
    if not isinstance(value, torch.Tensor) or all(isinstance(size, int) for size in value.shape):
        return value
    return torch.empty([size_at_hand(size) for size in value.shape], dtype=value.dtype, device="meta")
