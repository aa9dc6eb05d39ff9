"""vertical: forward and backward of one micro-batch become those of several, operator by operator."""

from __future__ import annotations

from textwrap import dedent

import pytest
from passes.building import Builder, aten

from zinf_fx import ops
from zinf_fx.passes.ir.framework import operator_of
from zinf_fx.passes.ir.printer import print_graph
from zinf_fx.passes.lowering.operator_groups import cut_where_least
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.lowering.vertical import vertical

TILES = {"a": (4, 4), "b": (4, 4)}


def forward(**options: object) -> Builder:
    """Build two layers and a sum, of one of three micro-batches of three rows; the second layer drops values."""
    built = Builder("forward", TILES, micro_batches=3, **options)
    x = built.call(ops.micro_batch, built.input(9, 4, name="primals_x"), 0, 3)
    scale = built.call(aten.full.default, [4], 2.0)
    hidden = built.call(aten.mm.default, x, built.gather("a"))
    hidden.name = "hidden"
    bernoulli = built.call(aten.bernoulli.p, hidden, 0.5)
    y = built.call(aten.mm.default, built.call(aten.mul.Tensor, hidden, bernoulli), built.gather("b"))
    loss = built.call(aten.sum.default, built.call(aten.mul.Tensor, y, scale))
    built.returns(built.call(ops.join, loss, "mean", 3), built.token("a"), x, hidden)
    return built


def backward(**options: object) -> Builder:
    """Build the gradient of the first layer."""
    built = Builder("backward", {"a": (4, 4)}, micro_batches=3, **options)
    x, hidden = built.input(3, 4, name="micro_batch_default"), built.input(3, 4, name="hidden")
    tangent = built.call(aten.div.Tensor, built.input(name="tangents_1"), 3)
    da = built.call(aten.mm.default, built.call(aten.t.default, x), built.call(aten.mul.Tensor, hidden, tangent))
    built.returns(built.call(ops.reduce_scatter, built.token("a"), da), gradients={0: "a"})
    return built


def texts(**options: object) -> tuple[str, str]:
    """Return both graphs, of a step."""
    ahead, behind = forward(**options), backward(**options)
    for built in (ahead, behind):
        built.module.graph = built.graph
    vertical(ahead.module, behind.module, ahead.context, 1)
    return print_graph(ahead.module.graph, ahead.context), print_graph(behind.module.graph, behind.context)


def test_golden() -> None:
    """The random numbers of the second and third micro-batch follow those of all layers of the ones before."""
    ahead, behind = texts()
    assert ahead == dedent("""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          %0 : f32[9, 4]
        nodes
          %1 = zinf.random_state(cpu)
          %2 = aten.zeros([3, 4], dtype=float32, device=cpu) : f32[3, 4]
          %3 = aten.bernoulli.p(%2, 0.5) : f32[3, 4]
          %4 = zinf.random_state(cpu)
          %5 = aten.zeros([3, 4], dtype=float32, device=cpu) : f32[3, 4]
          %6 = aten.bernoulli.p(%5, 0.5) : f32[3, 4]
          %7 = zinf.random_state(cpu)
          %8 = aten.full([4], 2.0) : f32[4]
          %9 = aten.slice.Tensor(%0, 0, 0, 3) : f32[3, 4]
          %10 = aten.slice.Tensor(%0, 0, 3, 6) : f32[3, 4]
          %11 = aten.slice.Tensor(%0, 0, 6, 9) : f32[3, 4]
          %12 = gather a : f32[4, 4]
          %13 = aten.mm(%9, %12) : f32[3, 4]
          %14 = zinf.set_random_state(%1, cpu)
          %15 = aten.bernoulli.p(%13, 0.5) : f32[3, 4]
          %16 = zinf.random_state(cpu)
          %17 = aten.mul.Tensor(%13, %15) : f32[3, 4]
          %18 = aten.mm(%10, %12) : f32[3, 4]
          %19 = zinf.set_random_state(%4, cpu)
          %20 = aten.bernoulli.p(%18, 0.5) : f32[3, 4]
          %21 = zinf.random_state(cpu)
          %22 = aten.mul.Tensor(%18, %20) : f32[3, 4]
          %23 = aten.mm(%11, %12) : f32[3, 4]
          %24 = zinf.set_random_state(%7, cpu)
          %25 = aten.bernoulli.p(%23, 0.5) : f32[3, 4]
          %26 = zinf.random_state(cpu)
          %27 = aten.mul.Tensor(%23, %25) : f32[3, 4]
          %28 = gather b : f32[4, 4]
          %29 = aten.mm(%17, %28) : f32[3, 4]
          %30 = aten.mul.Tensor(%29, %8) : f32[3, 4]
          %31 = aten.sum(%30) : f32[]
          %32 = aten.mm(%22, %28) : f32[3, 4]
          %33 = aten.mul.Tensor(%32, %8) : f32[3, 4]
          %34 = aten.sum(%33) : f32[]
          %35 = aten.add.Tensor(%31, %34) : f32[]
          %36 = aten.mm(%27, %28) : f32[3, 4]
          %37 = aten.mul.Tensor(%36, %8) : f32[3, 4]
          %38 = aten.sum(%37) : f32[]
          %39 = aten.add_.Tensor(%35, %38) : f32[]
          %40 = aten.div.Tensor(%39, 3) : f32[]
          %41 = zinf.set_random_state(%26, cpu)
        return %40, a, %9, %10, %11, %13, %18, %23
        """).lstrip("\n")
    assert behind == dedent("""
        backward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          %0 : f32[3, 4]
          %1 : f32[3, 4]
          %2 : f32[3, 4]
          %3 : f32[3, 4]
          %4 : f32[3, 4]
          %5 : f32[3, 4]
          %6 : f32[]
        nodes
          %7 = aten.div.Tensor(%6, 3) : f32[]
          %8 = aten.t(%0) : f32[4, 3]
          %9 = aten.mul.Tensor(%3, %7) : f32[3, 4]
          %10 = aten.mm(%8, %9) : f32[4, 4]
          %11 = aten.t(%1) : f32[4, 3]
          %12 = aten.mul.Tensor(%4, %7) : f32[3, 4]
          %13 = aten.mm(%11, %12) : f32[4, 4]
          %14 = aten.add.Tensor(%10, %13) : f32[4, 4]
          %15 = aten.t(%2) : f32[4, 3]
          %16 = aten.mul.Tensor(%5, %7) : f32[3, 4]
          %17 = aten.mm(%15, %16) : f32[4, 4]
          %18 = aten.add_.Tensor(%14, %17) : f32[4, 4]
          %19 = reduce_scatter a, %18 : f32[4, 4]
        return %19
        """).lstrip("\n")


def test_golden_of_a_group() -> None:
    """Each micro-batch runs both layers before the next one does."""
    ahead, _ = texts(micro_batch_group=3)
    assert ahead.partition("nodes\n")[2] == dedent("""
          %1 = zinf.random_state(cpu)
          %2 = aten.zeros([3, 4], dtype=float32, device=cpu) : f32[3, 4]
          %3 = aten.bernoulli.p(%2, 0.5) : f32[3, 4]
          %4 = zinf.random_state(cpu)
          %5 = aten.zeros([3, 4], dtype=float32, device=cpu) : f32[3, 4]
          %6 = aten.bernoulli.p(%5, 0.5) : f32[3, 4]
          %7 = zinf.random_state(cpu)
          %8 = aten.full([4], 2.0) : f32[4]
          %9 = gather a : f32[4, 4]
          %10 = gather b : f32[4, 4]
          %11 = aten.slice.Tensor(%0, 0, 0, 3) : f32[3, 4]
          %12 = aten.mm(%11, %9) : f32[3, 4]
          %13 = zinf.set_random_state(%1, cpu)
          %14 = aten.bernoulli.p(%12, 0.5) : f32[3, 4]
          %15 = zinf.random_state(cpu)
          %16 = aten.mul.Tensor(%12, %14) : f32[3, 4]
          %17 = aten.mm(%16, %10) : f32[3, 4]
          %18 = aten.mul.Tensor(%17, %8) : f32[3, 4]
          %19 = aten.sum(%18) : f32[]
          %20 = aten.slice.Tensor(%0, 0, 3, 6) : f32[3, 4]
          %21 = aten.mm(%20, %9) : f32[3, 4]
          %22 = zinf.set_random_state(%4, cpu)
          %23 = aten.bernoulli.p(%21, 0.5) : f32[3, 4]
          %24 = zinf.random_state(cpu)
          %25 = aten.mul.Tensor(%21, %23) : f32[3, 4]
          %26 = aten.mm(%25, %10) : f32[3, 4]
          %27 = aten.mul.Tensor(%26, %8) : f32[3, 4]
          %28 = aten.sum(%27) : f32[]
          %29 = aten.add.Tensor(%19, %28) : f32[]
          %30 = aten.slice.Tensor(%0, 0, 6, 9) : f32[3, 4]
          %31 = aten.mm(%30, %9) : f32[3, 4]
          %32 = zinf.set_random_state(%7, cpu)
          %33 = aten.bernoulli.p(%31, 0.5) : f32[3, 4]
          %34 = zinf.random_state(cpu)
          %35 = aten.mul.Tensor(%31, %33) : f32[3, 4]
          %36 = aten.mm(%35, %10) : f32[3, 4]
          %37 = aten.mul.Tensor(%36, %8) : f32[3, 4]
          %38 = aten.sum(%37) : f32[]
          %39 = aten.add_.Tensor(%29, %38) : f32[]
          %40 = aten.div.Tensor(%39, 3) : f32[]
          %41 = zinf.set_random_state(%34, cpu)
        return %40, a, %11, %20, %30, %12, %21, %31
        """).lstrip("\n")


def test_a_group_is_one_operator() -> None:
    """Its tiles come ahead of it."""
    operators = {}
    for size in (1, 3):
        ahead, behind = forward(micro_batch_group=size), backward(micro_batch_group=size)
        for built in (ahead, behind):
            built.module.graph = built.graph
        vertical(ahead.module, behind.module, ahead.context, 1)
        graph = ahead.module.graph
        Regions()(graph, SinkGathers()(graph, ahead.context))
        products = [node for node in graph.nodes if node.target is aten.mm.default]
        operators[size] = len(products), len(set(map(operator_of, products)))
    assert operators == {1: (6, 2), 3: (6, 1)}


@pytest.mark.parametrize(
    ("handed", "groups"),
    [
        ([9, 1, 5, 1, 4, 1, 7, 0], [0, 0, 1, 1, 2, 2, 3, 3]),
        ([20, 2, 10, 3, 30, 2, 0], [0, 0, 1, 1, 2, 2, 3]),
        ([1, 5, 9, 0], [0, 1, 1, 1]),
        ([0, 0, 0], [0, 1, 2]),
        ([3], [0]),
    ],
)
def test_groups_end_where_least_is_handed_on(handed: list[int], groups: list[int]) -> None:
    assert cut_where_least(handed) == groups
