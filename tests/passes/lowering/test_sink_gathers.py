"""sink_gathers: no tile is held before its first use."""

from __future__ import annotations

from passes.building import Builder, aten

from zinf_fx.passes.lowering.sink_gathers import SinkGathers


def test_golden() -> None:
    built = Builder("forward", {"a": (4, 4), "b": (4, 4), "unused": (4,), "returned": (4,)})
    x = built.input(2, 4)
    a, b, _, returned = (built.gather(name) for name in ("a", "b", "unused", "returned"))
    bt = built.call(aten.t.default, b)
    y = built.call(aten.mm.default, x, a)
    z = built.call(aten.mm.default, y, bt)
    both = built.call(aten.add.Tensor, z, built.call(aten.sum.default, b))
    built.returns(both, returned)
    built.check(
        SinkGathers(),
        before="""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          unused : f32[4] on nvme, gradient on host
          returned : f32[4] on nvme, gradient on host
          %0 : f32[2, 4]
        nodes
          %1 = gather a : f32[4, 4]
          %2 = gather b : f32[4, 4]
          %3 = gather unused : f32[4]
          %4 = gather returned : f32[4]
          %5 = aten.t(%2) : f32[4, 4]
          %6 = aten.mm(%0, %1) : f32[2, 4]
          %7 = aten.mm(%6, %5) : f32[2, 4]
          %8 = aten.sum(%2) : f32[]
          %9 = aten.add.Tensor(%7, %8) : f32[2, 4]
        return %9, %4
        """,
        after="""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          unused : f32[4] on nvme, gradient on host
          returned : f32[4] on nvme, gradient on host
          %0 : f32[2, 4]
        nodes
          %1 = gather unused : f32[4]
          %2 = gather a : f32[4, 4]
          %3 = aten.mm(%0, %2) : f32[2, 4]
          %4 = gather b : f32[4, 4]
          %5 = aten.t(%4) : f32[4, 4]
          %6 = aten.mm(%3, %5) : f32[2, 4]
          %7 = aten.sum(%4) : f32[]
          %8 = aten.add.Tensor(%6, %7) : f32[2, 4]
          %9 = gather returned : f32[4]
        return %8, %9
        """,
    )


def test_what_stands_where_it_is_used_stays() -> None:
    built = Builder("forward", {"a.weight": (4, 4), "a.bias": (4,)})
    x = built.input(2, 4)
    weight = built.call(aten.t.default, built.gather("a.weight"))
    built.returns(built.call(aten.addmm.default, built.gather("a.bias"), x, weight))
    before = built.text
    built.check(SinkGathers(), after=before)
