"""The gradient of a parameter, one range of its rows at a time."""

from __future__ import annotations

import torch
from torch import fx

from zinf_fx.passes.ir.framework import arguments_of, operand
from zinf_fx.passes.ir.rewriting import emit, emit_again, repeat_in_backward
from zinf_fx.passes.tiling.weight_uses import Rows, Untileable, moved_dim

aten = torch.ops.aten

# As the index of padding, it means that there is none.
_NO_ROW = -1
_ELEMENTWISE = {aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.mul.Tensor, aten.div.Tensor}


def terms_of(gradient: fx.Node) -> list[fx.Node]:
    """What a gradient is the sum of: a term for each use of the parameter."""
    terms, pending = [], [gradient]
    while pending:  # a sum is as deep as there are uses
        node = pending.pop()
        if is_sum(node):
            pending += reversed(arguments_of(node))
        else:
            terms.append(node)
    return terms


def is_sum(node: fx.Node) -> bool:
    """Whether a gradient is a sum of two."""
    return node.target is aten.add.Tensor and not node.kwargs and all(isinstance(term, fx.Node) for term in node.args)


def check_term(term: fx.Node, dim: int = 0) -> list[fx.Node]:
    """The values that ranges of a term along `dim` are computed from. Raises: Untileable."""
    factors, pending = [], [(term, dim)]
    while pending:
        term, dim = pending.pop()
        if term.target in (aten.mm.default, aten.bmm.default):
            ranged = _ranged_operands(term, dim)
            factors += [untransposed(a) if i in ranged else a for i, a in enumerate(arguments_of(term))]
        elif term.target is aten.embedding_dense_backward.default and dim == 0 and not term.args[4]:
            factors += term.args[:2]
        else:
            pending += reversed(_sources(term, dim))
    return factors


def _sources(term: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """The first arguments of a term, and the dimensions along which its ranges are made from ranges of these. Raises:
    Untileable."""
    if is_sum(term):
        return [(argument, dim) for argument in arguments_of(term)]
    source = _dim_of_input(term, dim)
    if source is None:
        what = str(term.target).removesuffix(".default")
        raise Untileable(
            f"its gradient comes from {what}" if term.op == "call_function" else "its gradient is an input"
        )
    return [(operand(term), source)]


def untransposed(value: fx.Node) -> fx.Node:
    """The value that this is a transposition of."""
    while value.op == "call_function" and value.target in (aten.t.default, aten.transpose.int, aten.permute.default):
        value = operand(value)
    return value


def rows_of_term(term: fx.Node, rows: Rows, dim: int = 0) -> fx.Node:
    """A range along `dim` of a term that `check_term` has accepted, computed at the insertion point."""
    made: list[fx.Node] = []
    pending: list[tuple[fx.Node, int, int]] = [(term, dim, 0)]
    while pending:
        term, dim, count = pending.pop()  # of the last ranges that are made, so many are the term's own
        if count:
            parts, made = made[-count:], made[:-count]
            made.append(emit_again(term, *parts, *term.args[count:]))
        elif term.target in (aten.mm.default, aten.bmm.default):
            ranged = _ranged_operands(term, dim)
            operands = [_rows_of_value(a, rows, dim) if i in ranged else a for i, a in enumerate(arguments_of(term))]
            made.append(emit_again(term, *operands))
        elif term.target is aten.embedding_dense_backward.default:
            made.append(_embedding_rows(term, rows))
        else:
            sources = _sources(term, dim)
            pending += [(term, dim, len(sources)), *((source, along, 0) for source, along in reversed(sources))]
    return made[0]


def _ranged_operands(product: fx.Node, dim: int) -> tuple[int, ...]:
    """Which operands of a product a range of its result along `dim` is made from a range of."""
    batched = product.target is aten.bmm.default
    return (0, 1) if batched and dim == 0 else (dim - batched,)


def _embedding_rows(term: fx.Node, rows: Rows) -> fx.Node:
    gradient, indices, _, padding, _ = arguments_of(term)
    _, local = rows.indices(term, indices, _NO_ROW)
    if rows.start <= padding < rows.end:
        padded = repeat_in_backward(emit(term, aten.eq.Scalar, indices, padding))
        local = repeat_in_backward(emit(term, aten.masked_fill.Scalar, local, padded, _NO_ROW))
    return emit(term, term.target, gradient, local, rows.end - rows.start, _NO_ROW, False)


def _rows_of_value(value: fx.Node, rows: Rows, dim: int) -> fx.Node:
    """A range of any value, of what it is a transposition of if it is one: so the whole is not transposed."""
    if value is not untransposed(value):
        source = _dim_of_input(value, dim)
        assert source is not None
        return emit_again(value, _rows_of_value(operand(value), rows, source), *value.args[1:])
    return rows.of(value, value, dim)


def _dim_of_input(node: fx.Node, dim: int) -> int | None:
    """The dimension of the first input that dimension `dim` of the result comes from; None: they don't correspond."""
    if node.op != "call_function":
        return None
    if node.target in _ELEMENTWISE:
        return dim if not any(isinstance(argument, fx.Node) for argument in node.args[1:]) else None
    count = node.meta["val"].dim() if isinstance(node.meta.get("val"), torch.Tensor) else 0
    return next((source for source in range(count) if moved_dim(node, source) == dim), None)
