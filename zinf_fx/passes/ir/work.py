"""How much a node computes: its floating point operations, the bytes of memory that it reads and writes, and in how
many kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import register_flop_formula

from zinf_fx import ops
from zinf_fx.flops import formula_of, name_of, seems_a_product
from zinf_fx.passes.ir.aliases import is_view_node
from zinf_fx.passes.ir.framework import bytes_computed, size_at_hand

log = logging.getLogger("zinf_fx")


@register_flop_formula(ops.quantised_mm.overloadpacket)
def _flops_of_product(left: torch.Size, *args: object, out_shape: torch.Size, **kwargs: object) -> int:
    return 2 * left.numel() * out_shape[1]


class Work(NamedTuple):
    """What one or several nodes compute.

    `flops` of matrix products, convolutions and attention, by `zinf_fx.flops`; `product_bytes` read and written by
    these; `other_bytes` by all others; `dtype` of what most of the flops are done with, None where there are none;
    `kernels` that a device is given, one by one.
    """

    flops: int = 0
    product_bytes: int = 0
    other_bytes: int = 0
    dtype: torch.dtype | None = None
    kernels: int = 0


def work_of(node: fx.Node) -> Work:
    """The work of one node, with the sizes at hand where they are symbolic. A view has none. A product that can't be
    counted has that of its bytes, and is warned of once."""
    if is_view_node(node):
        return Work()
    nbytes = bytes_computed(node) + sum(map(bytes_computed, node.all_input_nodes))
    flops = _flops(node)
    if not flops:
        return Work(other_bytes=nbytes, kernels=int(_is_kernel(node)))
    operand = next(_operands(node), None)
    return Work(flops, product_bytes=nbytes, dtype=None if operand is None else operand.dtype, kernels=1)


def _flops(node: fx.Node) -> int:
    target, arguments = _operation(node)
    count = formula_of(target)
    if count is None:
        if seems_a_product(target, len([operand for operand in _operands(node) if operand.ndim > 1])):
            _warn_of_uncounted(name_of(target), "has no formula")
        return 0
    if not all(_has_size(sized) for sized in (node, *node.all_input_nodes)):
        _warn_of_uncounted(name_of(target), "has sizes that are known at run time only")
        return 0
    args, kwargs = fx.map_arg((arguments, node.kwargs), lambda n: tree_map(_at_hand, n.meta.get("val")))
    try:
        return int(count(*args, **kwargs, out_val=tree_map(_at_hand, node.meta.get("val"))))
    except Exception as error:  # which anybody can register, and some have assertions
        _warn_of_uncounted(name_of(target), f"has a formula that raised {type(error).__name__}: {error}")
        return 0


def _operation(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator that a node runs, and what that takes. Attention that backward repeats, for one, is run by an
    operator that saves the state of the random numbers, or sets it: it is among the arguments of that, before its own.
    """
    position = next((n for n, arg in enumerate(node.args) if isinstance(arg, torch._ops.OpOverload)), None)
    if position is None:
        return node.target, node.args
    return node.args[position], node.args[position + 1 :]


@cache
def _warn_of_uncounted(name: str, why: str) -> None:
    log.warning(
        "the arithmetic of %s isn't counted, because it %s: predictions and choices take it for the bytes that it "
        "reads and writes. torch.utils.flop_counter.register_flop_formula gives an operator a formula",
        name,
        why,
    )


def total(works: Iterable[Work], fused: bool) -> Work:
    """Add up the work of several nodes. `fused`: what is between two products is taken for one kernel, as a compiler of
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
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _operands(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield each tensor that the operator of a node takes, as often as it takes it."""
    sources: list[fx.Node] = []
    fx.map_arg((_operation(node)[1], node.kwargs), sources.append)
    return (operand for source in sources for operand in _tensors(source))


def _has_size(node: fx.Node) -> bool:
    return all(size_at_hand(size) is not None for tensor in _tensors(node) for size in tensor.shape)


def _at_hand(value: Any) -> Any:
    """Give a part of a node's result the sizes at hand."""
    if isinstance(value, torch.SymInt):
        return size_at_hand(value)
    if not isinstance(value, torch.Tensor) or all(isinstance(size, int) for size in value.shape):
        return value
    return torch.empty([size_at_hand(size) or 0 for size in value.shape], dtype=value.dtype, device="meta")
