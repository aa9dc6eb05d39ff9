"""Where a graph computes with a parameter, and the same computations with one range of its rows at a time.

A use is reached from a gather through dequantisation, transpositions and casts, which make the rows another dimension
of the operand (`dim`). A matrix product with a range of the operand is either a range of the result, when `dim` stays
in it, or a term of it, when the product sums over `dim`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Target

from zinf_fx import ops
from zinf_fx.passes.ir.framework import arguments_of, operand
from zinf_fx.passes.ir.rewriting import emit, emit_again, repeat_in_backward

aten = torch.ops.aten

_SAME_DIMS = {ops.dequantize, aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default}
_PRODUCTS: dict[Target, int] = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
}  # position of the left operand


@dataclass(frozen=True)
class Rows:
    """A range of a parameter's rows."""

    start: int
    end: int
    last: bool

    def indices(self, like: fx.Node, indices: fx.Node, outside: int) -> tuple[fx.Node, fx.Node]:
        """Return which row numbers fall into the range, and their places in it; `outside` is the place of the others.

        The first range is open below, and the last above, so that an index that doesn't exist has no place.
        """

        def compute(*args: object) -> fx.Node:
            return repeat_in_backward(emit(like, *args))

        tests = [(aten.ge.Scalar, self.start)] if self.start else []
        tests += [] if self.last else [(aten.lt.Scalar, self.end)]
        inside = [compute(test, indices, bound) for test, bound in tests]
        both = compute(aten.logical_and.default, *inside) if len(inside) == 2 else inside[0]
        shifted = compute(aten.sub.Tensor, indices, self.start) if self.start else indices
        return both, compute(aten.where.ScalarOther, both, shifted, outside)

    def of(self, like: fx.Node, value: fx.Node, dim: int) -> fx.Node:
        """The range of a value whose dimension `dim` goes along with the rows."""
        return emit(like, aten.slice.Tensor, value, dim, self.start, self.end)


@dataclass(frozen=True)
class Use:
    """A node that computes with a parameter.

    Attributes:
        node: it computes.
        operand: what it computes with: the gather, or a transposition or cast of it.
        way: the transpositions and casts, in order.
        dim: the dimension of the operand that the rows are.
    """

    node: fx.Node
    operand: fx.Node
    way: tuple[fx.Node, ...]
    dim: int

    @property
    def operands(self) -> tuple[fx.Node, fx.Node]:
        """What is multiplied by a product; the table and the indices of an embedding."""
        first = _PRODUCTS.get(self.node.target, 0)
        return operand(self.node, first), operand(self.node, first + 1)

    @property
    def other_operand(self) -> fx.Node:
        """The operand that is not of the parameter."""
        left, right = self.operands
        return right if self.operand is left else left


GatherRange = Callable[[Rows, fx.Node], fx.Node]
Divided = tuple[fx.Node, list[fx.Node]]  # the result, and the last node of each range


class Untileable(Exception):
    """Why a parameter stays whole."""


def moved_dim(node: fx.Node, dim: int) -> int | None:
    """Return where a transposition or cast puts dimension `dim` of its input; None: the node is something else."""
    if node.target in _SAME_DIMS:
        return dim
    if node.target is aten.t.default:
        return 1 - dim if node.meta["val"].dim() == 2 else None
    if node.target is aten.transpose.int:
        count = node.meta["val"].dim()
        first, second = (d % count for d in node.args[1:3])
        return {first: second, second: first}.get(dim, dim)
    if node.target is aten.permute.default:
        count = node.meta["val"].dim()
        return [d % count for d in arguments_of(node)[1]].index(dim)
    return None


def uses_of(gather: fx.Node) -> list[Use]:
    """All uses of a gathered parameter. Raises: Untileable."""
    uses = []
    pending: list[tuple[fx.Node, tuple[fx.Node, ...], int]] = [(gather, (), 0)]
    for value, way, dim in pending:
        for user in value.users:
            moved = moved_dim(user, dim)
            if moved is not None:
                pending.append((user, (*way, user), moved))
            else:
                uses.append(_use(user, value, way, dim))
    return uses


def _use(node: fx.Node, operand: fx.Node, way: tuple[fx.Node, ...], dim: int) -> Use:
    if node.op == "output":
        raise Untileable("it is a result of the graph")
    use = Use(node, operand, way, dim)
    if sum(argument is operand for argument in node.args) == 1:
        if node.target is aten.embedding.default and node.args[0] is operand and dim == 0 and not any(node.args[4:]):
            return use
        if node.target in _PRODUCTS and operand in use.operands and not node.kwargs:
            return use
    raise Untileable(f"{str(node.target).removesuffix('.default')} computes with it")


def tile_use(use: Use, ranges: list[Rows], gather: GatherRange) -> list[fx.Node]:
    """Replace a use by one per range; `gather` makes the gather of a range. Returns the last node of each range."""
    divide = _embedding if use.node.target is aten.embedding.default else _product
    with use.node.graph.inserting_before(use.node):
        result, ends = divide(use, ranges, gather)
    use.node.replace_all_uses_with(result)
    use.node.graph.erase_node(use.node)
    return ends


def _operand(use: Use, gathered: fx.Node) -> fx.Node:
    for step in use.way:
        gathered = emit_again(step, gathered, *step.args[1:])
    return gathered


def _embedding(use: Use, ranges: list[Rows], gather: GatherRange) -> Divided:
    """Look every index up in the range that it falls into; one that doesn't exist is refused as ever."""
    like, indices = use.node, use.other_operand
    result, ends = None, []
    for rows in ranges:
        inside, local = rows.indices(like, indices, 0)
        table = _operand(use, gather(rows, like))
        part = emit(like, aten.embedding.default, table, local)
        if result is not None:
            mask = emit(like, aten.unsqueeze.default, inside, -1)
            part = emit(like, aten.where.self, mask, part, result)
        result = part
        ends.append(part)
    assert result is not None
    return result, ends


def _product(use: Use, ranges: list[Rows], gather: GatherRange) -> Divided:
    like, factor = use.node, use.other_operand
    on_the_left = use.operand is use.operands[0]
    count = use.operand.meta["val"].dim()
    batched, summed = use.dim < count - 2, use.dim == (count - 1 if on_the_left else count - 2)
    # The dimension of the other operand that goes along with the rows.
    along = use.dim if batched else (count - 2 if on_the_left else count - 1)
    parts, total = [], None
    dtype = like.meta["val"].dtype
    for number, rows in enumerate(ranges):
        gathered = _operand(use, gather(rows, like))
        beside = rows.of(like, factor, along) if batched or summed else factor
        operands = (gathered, beside) if on_the_left else (beside, gathered)
        target = like.target
        if target is aten.addmm.default:
            if summed and number:
                target = aten.mm.default
            else:
                operands = (_addend(like, rows, use.dim, summed), *operands)
        part = emit(like, target, *operands)
        if summed:
            # What is rounded to 16 bits between the terms would be lost.
            if number:
                part = emit(like, aten.add.Tensor, total, part)
            elif dtype.itemsize <= 2:
                part = emit(like, aten._to_copy.default, part, dtype=torch.float32)
            total = part
        parts.append(part)
    if summed and dtype.itemsize <= 2:
        total = emit(like, aten._to_copy.default, total, dtype=dtype)
    return emit(like, aten.cat.default, parts, use.dim) if total is None else total, parts


def _addend(like: fx.Node, rows: Rows, dim: int, summed: bool) -> fx.Node:
    """The part of what an addmm adds that belongs to a range of its result."""
    addend = operand(like)
    position = dim - 2 + addend.meta["val"].dim()
    if summed or position < 0 or addend.meta["val"].shape[position] == 1:
        return addend
    return rows.of(like, addend, position)
