"""Which values are equal on all ranks of tensor parallelism: [Note: equal values], case by case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passes.building import Builder, aten
from torch import fx

from zinf_fx.passes.activations.replication import EQUAL, Replicas, mark_equal
from zinf_fx.passes.ir.collectives import WAIT

functional = torch.ops._c10d_functional

Case = Callable[[Builder, fx.Node, fx.Node, fx.Node], fx.Node]
"""A value of a graph, made of an input, a parameter that every rank has, and one that is divided."""


def collective(operation: torch._ops.OpOverload, *arguments: object) -> Case:
    """Return a collective of what differs."""
    return lambda built, x, same, part: built.call(WAIT, built.call(operation, part, *arguments))


def random(built: Builder, x: fx.Node) -> fx.Node:
    return built.call(aten.rand_like.default, x)


CASES: dict[str, tuple[Case, bool]] = {
    "input": (lambda built, x, same, part: x, True),
    "of equal values": (lambda built, x, same, part: built.call(aten.mm.default, x, same), True),
    "of a part": (lambda built, x, same, part: built.call(aten.mm.default, x, part), False),
    "sum of all parts": (collective(functional.all_reduce.default, "sum", "tp"), True),
    "all parts": (collective(functional.all_gather_into_tensor.default, 2, "tp"), True),
    "sum over other ranks": (collective(functional.all_reduce.default, "sum", "dp"), False),
    "part of the sum": (collective(functional.reduce_scatter_tensor.default, "sum", 2, "tp"), False),
    "random": (lambda built, x, same, part: built.call(aten.bernoulli.p, x, 0.5), False),
    "of random": (
        lambda built, x, same, part: built.call(aten.relu.default, built.call(aten.rand_like.default, x)),
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    make, expected = CASES[name]
    built = Builder("joint", {"same": (4, 4), "part": (4, 4)}, frozen=("same",))
    x = built.input(4, 4)
    value = make(built, x, built.gather("same"), built.gather("part"))
    built.returns(value)
    mark_equal(built.graph, built.context, replicas(built, "same"))
    assert value.meta[EQUAL] == expected


def replicas(built: Builder, *ordinary: str, differing: frozenset[int] = frozenset()) -> Replicas:
    names = frozenset(built.token(name).name for name in ordinary)
    return Replicas("tp", frozenset({built.token("part").name}), names, differing)


def test_another_constant_on_another_rank_is_another_value() -> None:
    built = Builder("joint", {"part": (4, 4)})
    x = built.input(4)
    shifted = built.call(aten.sub.Tensor, x, 48)
    built.returns(shifted)
    number = list(built.graph.nodes).index(shifted)
    mark_equal(built.graph, built.context, replicas(built, differing=frozenset({number})))
    assert x.meta[EQUAL] and not shifted.meta[EQUAL]


@pytest.mark.parametrize("reduced", [True, False])
def test_an_ordinary_parameter_is_equal_while_its_gradient_is(reduced: bool) -> None:
    built = Builder("joint", {"scale": (4, 4), "part": (4, 4)})
    x = built.input(4, 4)
    scale = built.gather("scale")
    result = built.call(aten.mul.Tensor, x, scale)
    gradient = built.call(aten.mm.default, x, built.gather("part"))
    if reduced:
        gradient = built.call(WAIT, built.call(functional.all_reduce.default, gradient, "sum", "tp"))
    built.returns(result, gradient, gradients={0: "scale"}, backward=1)
    mark_equal(built.graph, built.context, replicas(built, "scale"))
    assert x.meta[EQUAL] and scale.meta[EQUAL] == result.meta[EQUAL] == reduced
