"""offload_gradients: each shard leaves for its tier, and autograd gets None."""

from __future__ import annotations

from passes.building import Builder, aten

from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.offload_gradients import OffloadGradients
from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers


def test_golden() -> None:
    built = Builder("backward", {"a": (4, 4), "bias": (4,)})
    x, tangent = built.input(2, 4), built.input(2, 4, name="tangents_1")
    dw = built.call(aten.mm.default, built.call(aten.t.default, x), tangent)
    dx = built.call(aten.mm.default, tangent, built.call(aten.t.default, built.gather("a")))
    db = built.call(aten.sum.dim_IntList, tangent, [0])
    built.returns(dw, dx, db, gradients={0: "a", 2: "bias"}, backward=3)
    built.run(ReduceGradients(), SinkGathers(), Regions(), LowerGathers())
    built.check(
        OffloadGradients(),
        before="""
        backward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          bias : f32[4] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : f32[2, 4]
        operator 0
          %2 = aten.t(%0) : f32[4, 2]
          %3 = aten.mm(%2, %1) : f32[4, 4]
          %4 = reduce_scatter a, %3 : f32[4, 4]  # reduce_gradients
        operator 1
          fetch a  # lower_gathers
          upload a  # lower_gathers
          allgather a  # lower_gathers
          %5 = wait a : f32[4, 4]  # lower_gathers
          %6 = aten.t(%5) : f32[4, 4]
          %7 = aten.mm(%1, %6) : f32[2, 4]
          release a  # lower_gathers
          %8 = aten.sum.dim_IntList(%1, [0]) : f32[4]
          %9 = reduce_scatter bias, %8 : f32[4]  # reduce_gradients
        return %4, %7, %9
        """,
        after="""
        backward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          bias : f32[4] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : f32[2, 4]
        operator 0
          %2 = aten.t(%0) : f32[4, 2]
          %3 = aten.mm(%2, %1) : f32[4, 4]
          %4 = reduce_scatter a, %3 : f32[4, 4]  # reduce_gradients
          offload a, %4  # offload_gradients
        operator 1
          fetch a  # lower_gathers
          upload a  # lower_gathers
          allgather a  # lower_gathers
          %5 = wait a : f32[4, 4]  # lower_gathers
          %6 = aten.t(%5) : f32[4, 4]
          %7 = aten.mm(%1, %6) : f32[2, 4]
          release a  # lower_gathers
          %8 = aten.sum.dim_IntList(%1, [0]) : f32[4]
          %9 = reduce_scatter bias, %8 : f32[4]  # reduce_gradients
          offload bias, %9  # offload_gradients
        return None, %7, None
        """,
    )
