"""aliases: who shares memory with whom, by the schemas; test_models.py has what tracing saw of real models."""

from __future__ import annotations

import operator

import pytest
import torch
from passes.building import Builder, aten

from zinf_fx.passes.ir.aliases import aliased_inputs, aliases_of, is_view_node

# Operator, its arguments after the tensor, and whether the result shares the tensor's memory.
OPERATORS = [
    (aten.t.default, (), True),
    (aten.view.default, ([16],), True),
    (aten._unsafe_view.default, ([16],), True),
    (aten._reshape_alias.default, ([2, 8], [8, 1]), True),
    (aten.as_strided.default, ([2], [1]), True),
    (aten.expand.default, ([3, 4, 4],), True),
    (aten.select.int, (0, 1), True),
    (aten.slice.Tensor, (0, 1, 3), True),
    (aten.detach.default, (), True),
    (aten.alias.default, (), True),
    (aten.lift_fresh.default, (), True),
    (aten.split.Tensor, (2,), True),
    (aten.split_with_sizes.default, ([1, 3],), True),
    (aten.unbind.int, (), True),
    (aten.diagonal.default, (), True),
    (aten.clone.default, (), False),
    (aten._to_copy.default, (), False),
    (aten.relu.default, (), False),
    (aten.mul.Tensor, (2.0,), False),
    (aten.native_layer_norm.default, ([4], None, None, 1e-5), False),
    (aten.split_copy.Tensor, (2,), False),
    (aten.sum.default, (), False),
]


@pytest.mark.parametrize(("op", "arguments", "shares"), OPERATORS, ids=[str(op) for op, _, _ in OPERATORS])
def test_operators(op: torch._ops.OpOverload, arguments: tuple, shares: bool) -> None:
    built = Builder()
    x = built.input(4, 4)
    node = built.call(op, x, *arguments)
    assert aliased_inputs(node) == ([x] if shares else [])
    assert is_view_node(node) == shares
    real = torch.randn(4, 4)
    results = op(real, *arguments)
    results = results if isinstance(results, (tuple, list)) else (results,)
    memory = real.untyped_storage().data_ptr()
    assert any(r.untyped_storage().data_ptr() == memory for r in results) == shares


def test_in_place_operations_share_but_are_no_views() -> None:
    built = Builder()
    x, y = built.input(4), built.input(4, name="primals_y")
    node = built.call(aten.copy_.default, x, y)
    assert aliased_inputs(node) == [x] and not is_view_node(node)


def test_arguments_by_name() -> None:
    built = Builder()
    x = built.input(4, 4)
    node = built.graph.call_function(aten.t.default, (), {"self": x})
    assert aliased_inputs(node) == [x]


def test_members_of_a_tuple() -> None:
    built = Builder()
    x = built.input(4, 4)
    halves = built.call(aten.split.Tensor, x, 2)
    member = built.call(operator.getitem, halves, 1)
    view = built.call(aten.t.default, member)
    product = built.call(aten.mm.default, member, view)
    assert aliases_of(x) == [x, halves, member, view]
    assert aliases_of(member) == [member, view]
    assert aliases_of(product) == [product]


def test_an_operator_without_a_schema_may_share_all_inputs() -> None:
    built = Builder()
    x, y = built.input(4), built.input(4, name="primals_y")
    node = built.graph.call_function(torch.ops.higher_order.cond, (x, None, None, (y,)))
    assert aliased_inputs(node) == [x, y] and not is_view_node(node)


def test_sizes_share_nothing() -> None:
    built = Builder()
    x = built.input(4, 4)
    size = built.call(aten.sym_size.int, x, 0)
    assert aliased_inputs(size) == [] == aliased_inputs(built.graph.call_function(operator.mul, (size, 2)))
    assert not is_view_node(size)
