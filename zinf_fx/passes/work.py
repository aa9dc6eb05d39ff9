"""How much a node computes: its floating point operations, and the bytes of memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zinf_fx.passes.aliases import is_view
from zinf_fx.passes.framework import bytes_computed


class Work(NamedTuple):
    """`flops` of matrix products, convolutions and attention, by the formulas of `torch.utils.flop_counter`; `nbytes`
    read and written; `dtype` of most of the flops, None where there are none."""

    flops: int = 0
    nbytes: int = 0
    dtype: torch.dtype | None = None


def work_of(node: fx.Node) -> Work:
    """The work of one node. A view has none; where a size is known at run time only, flops are not counted."""
    if is_view(node):
        return Work()
    nbytes = bytes_computed(node) + sum(map(bytes_computed, node.all_input_nodes))
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None or not all(_is_static(one) for one in (node, *node.all_input_nodes)):
        return Work(0, nbytes)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    flops = int(count(*args, **kwargs, out_val=node.meta["val"]))
    value = node.meta["val"]
    dtype = (value[0] if isinstance(value, (tuple, list)) else value).dtype
    return Work(flops, nbytes, dtype if flops else None)


def total(works: Sequence[Work]) -> Work:
    """Of several nodes together."""
    heaviest = max(works, key=lambda work: work.flops, default=Work())
    return Work(sum(work.flops for work in works), sum(work.nbytes for work in works), heaviest.dtype)


def _is_static(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(size, int) for one in values if isinstance(one, torch.Tensor) for size in one.shape)
