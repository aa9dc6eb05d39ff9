"""Products with quantised matrices become one operation, which never has all values of the matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.framework import GraphContext, Pass, arguments_of, nodes_calling, operand
from zinf_fx.passes.ir.rewriting import emit, erase_unused

aten = torch.ops.aten


class MultiplyQuantised(Pass):
    """Replace each `mm` and `addmm` whose right side is the values of a quantised matrix, transposed or not.

    What else takes the values takes all of them at once.
    """

    name = "multiply_quantised"

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        for values in nodes_calling(graph, ops.dequantize):
            packed, shape, name, dtype = arguments_of(values)
            if len(shape) != 1:
                continue
            for matrix, transposed in list(_transpositions(values, False)):
                for user in list(matrix.users):
                    if (product := _product(user, matrix)) is not None:
                        left, bias = product
                        with graph.inserting_before(user):
                            args = (left, packed, *shape, name, dtype, transposed)
                            new = emit(user, ops.quantised_mm, *args, **({} if bias is None else {"bias": bias}))
                        user.replace_all_uses_with(new)
                        graph.erase_node(user)
            for unused in [matrix for matrix, _ in _transpositions(values, False) if not matrix.users]:
                erase_unused(unused)
        return context


def _transpositions(matrix: fx.Node, transposed: bool) -> Iterator[tuple[fx.Node, bool]]:
    """The matrix and what it is transposed to, with whether that is another way round than the first."""
    yield matrix, transposed
    for user in matrix.users:
        if user.target is aten.t.default:
            yield from _transpositions(user, not transposed)


def _product(user: fx.Node, matrix: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """What `matrix` is multiplied to from the left, and the bias, if that is all that a node computes."""
    if user.target is aten.mm.default and user.args[0] is not matrix:
        return operand(user), None
    if user.target is aten.addmm.default and not user.kwargs and matrix is user.args[2] and matrix not in user.args[:2]:
        return operand(user, 1), operand(user)
    return None
