"""reduce_gradients: a reduce-scatter between each gradient of a tile and the output that it is."""

from __future__ import annotations

from passes.building import Builder, aten

from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients


def test_golden() -> None:
    built = Builder("joint", {"a.weight": (4, 4), "a.bias": (4,), "unused": (4,)})
    x, tangent = built.input(2, 4), built.input(2, 4, name="tangents_1")
    y = built.call(aten.addmm.default, built.gather("a.bias"), x, built.gather("a.weight"))
    dw = built.call(aten.mm.default, built.call(aten.t.default, x), tangent)
    db = built.call(aten.sum.dim_IntList, tangent, [0])
    built.returns(y, dw, db, None, None, gradients={0: "a.weight", 1: "a.bias", 2: "unused"}, backward=4)
    built.check(
        ReduceGradients(),
        before="""
        joint graph
        inputs
          a.weight : f32[4, 4] on nvme, gradient on host
          a.bias : f32[4] on nvme, gradient on host
          unused : f32[4] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : f32[2, 4]
        nodes
          %2 = gather a.bias : f32[4]
          %3 = gather a.weight : f32[4, 4]
          %4 = aten.addmm(%2, %0, %3) : f32[2, 4]
          %5 = aten.t(%0) : f32[4, 2]
          %6 = aten.mm(%5, %1) : f32[4, 4]
          %7 = aten.sum.dim_IntList(%1, [0]) : f32[4]
        return %4
        return of backward %6, %7, None, None
        """,
        after="""
        joint graph
        inputs
          a.weight : f32[4, 4] on nvme, gradient on host
          a.bias : f32[4] on nvme, gradient on host
          unused : f32[4] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : f32[2, 4]
        nodes
          %2 = gather a.bias : f32[4]
          %3 = gather a.weight : f32[4, 4]
          %4 = aten.addmm(%2, %0, %3) : f32[2, 4]
          %5 = aten.t(%0) : f32[4, 2]
          %6 = aten.mm(%5, %1) : f32[4, 4]
          %7 = reduce_scatter a.weight, %6 : f32[4, 4]  # reduce_gradients
          %8 = aten.sum.dim_IntList(%1, [0]) : f32[4]
          %9 = reduce_scatter a.bias, %8 : f32[4]  # reduce_gradients
        return %4
        return of backward %7, %9, None, None
        """,
    )
    assert list(built.context.gradients) == [0, 1]  # there is no gradient of what is unused


def test_one_node_may_be_the_gradient_of_two_tiles() -> None:
    built = Builder("joint", {"a": (2, 4), "b": (2, 4)})
    tangent = built.input(2, 4, name="tangents_1")
    y = built.call(aten.add.Tensor, built.gather("a"), built.gather("b"))
    dy = built.call(aten.mul.Tensor, tangent, 2.0)
    built.returns(y, dy, dy, gradients={0: "a", 1: "b"}, backward=2)
    built.check(
        ReduceGradients(),
        after="""
        joint graph
        inputs
          a : f32[2, 4] on nvme, gradient on host
          b : f32[2, 4] on nvme, gradient on host
          %0 : f32[2, 4]
        nodes
          %1 = gather a : f32[2, 4]
          %2 = gather b : f32[2, 4]
          %3 = aten.add.Tensor(%1, %2) : f32[2, 4]
          %4 = aten.mul.Tensor(%0, 2.0) : f32[2, 4]
          %5 = reduce_scatter b, %4 : f32[2, 4]  # reduce_gradients
          %6 = reduce_scatter a, %4 : f32[2, 4]  # reduce_gradients
        return %3
        return of backward %6, %5
        """,
    )


def test_a_gradient_that_is_an_input() -> None:
    built = Builder("joint", {"a": (2, 4)})
    tangent = built.input(2, 4, name="tangents_1")
    built.input(2, name="tangents_2")
    y = built.call(aten.sin.default, built.gather("a"))
    built.returns(y, tangent, gradients={0: "a"}, backward=1)
    built.check(
        ReduceGradients(),
        after="""
        joint graph
        inputs
          a : f32[2, 4] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : f32[2]
        nodes
          %2 = reduce_scatter a, %0 : f32[2, 4]  # reduce_gradients
          %3 = gather a : f32[2, 4]
          %4 = aten.sin(%3) : f32[2, 4]
        return %4
        return of backward %2
        """,
    )
