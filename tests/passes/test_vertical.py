"""vertical: forward and backward of one micro-batch become those of several, operator by operator."""

from __future__ import annotations

from textwrap import dedent

from building import Builder, aten

from zinf_fx import ops
from zinf_fx.passes.ir.printer import print_graph
from zinf_fx.passes.lowering.vertical import vertical

TILES = {"a": (4, 4), "b": (4, 4)}


def forward() -> Builder:
    """Two layers and a sum, of one of three micro-batches of three rows; the second layer drops values."""
    built = Builder("forward", TILES, micro_batches=3)
    x = built.call(ops.micro_batch, built.input(9, 4, name="primals_x"), 0, 3)
    scale = built.call(aten.full.default, [4], 2.0)
    hidden = built.call(aten.mm.default, x, built.gather("a"))
    hidden.name = "hidden"
    bernoulli = built.call(aten.bernoulli.p, hidden, 0.5)
    y = built.call(aten.mm.default, built.call(aten.mul.Tensor, hidden, bernoulli), built.gather("b"))
    loss = built.call(aten.sum.default, built.call(aten.mul.Tensor, y, scale))
    built.returns(built.call(ops.join, loss, "mean", 3), built.token("a"), x, hidden)
    return built


def backward() -> Builder:
    """The gradient of the first layer."""
    built = Builder("backward", {"a": (4, 4)}, micro_batches=3)
    x, hidden = built.input(3, 4, name="micro_batch_default"), built.input(3, 4, name="hidden")
    tangent = built.call(aten.div.Tensor, built.input(name="tangents_1"), 3)
    da = built.call(aten.mm.default, built.call(aten.t.default, x), built.call(aten.mul.Tensor, hidden, tangent))
    built.returns(built.call(ops.reduce_scatter, built.token("a"), da), gradients={0: "a"})
    return built


def texts() -> tuple[str, str]:
    """Both graphs, of a step."""
    ahead, behind = forward(), backward()
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
