"""regions: a new operator begins where a matrix is needed after something was computed."""

from __future__ import annotations

import torch
from passes.building import Builder, aten
from passes.models import trained

from zinf_fx.passes.ir.framework import is_compute, operator_of
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers


def test_golden() -> None:
    built = Builder("forward", {"a": (4, 4), "norm": (4,), "b": (4, 4)})
    x = built.input(4, 2)
    positions = built.call(aten.arange.default, 4, device=torch.device("cpu"))
    xt = built.call(aten.t.default, x)  # neither views nor constants are an operator by themselves
    y = built.call(aten.mm.default, xt, built.gather("a"))
    y = built.call(aten.mul.Tensor, y, built.gather("norm"))  # a vector goes with what is there
    z = built.call(aten.mm.default, y, built.gather("b"))
    z = built.call(aten.mm.default, z, built.gather("a"))  # the tile is there already
    built.returns(built.call(aten.add.Tensor, z, positions))
    built.check(
        SinkGathers(),
        Regions(),
        before="""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          norm : f32[4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          %0 : f32[4, 2]
        nodes
          %1 = aten.arange(4, device=cpu) : i64[4]
          %2 = aten.t(%0) : f32[2, 4]
          %3 = gather a : f32[4, 4]
          %4 = aten.mm(%2, %3) : f32[2, 4]
          %5 = gather norm : f32[4]
          %6 = aten.mul.Tensor(%4, %5) : f32[2, 4]
          %7 = gather b : f32[4, 4]
          %8 = aten.mm(%6, %7) : f32[2, 4]
          %9 = gather a : f32[4, 4]
          %10 = aten.mm(%8, %9) : f32[2, 4]
          %11 = aten.add.Tensor(%10, %1) : f32[2, 4]
        return %11
        """,
        after="""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          norm : f32[4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          %0 : f32[4, 2]
        operator 0
          %1 = aten.arange(4, device=cpu) : i64[4]
          %2 = aten.t(%0) : f32[2, 4]
          %3 = gather a : f32[4, 4]
          %4 = aten.mm(%2, %3) : f32[2, 4]
          %5 = gather norm : f32[4]
          %6 = aten.mul.Tensor(%4, %5) : f32[2, 4]
        operator 1
          %7 = gather b : f32[4, 4]
          %8 = aten.mm(%6, %7) : f32[2, 4]
          %9 = gather a : f32[4, 4]
          %10 = aten.mm(%8, %9) : f32[2, 4]
          %11 = aten.add.Tensor(%10, %1) : f32[2, 4]
        return %11
        """,
    )


def test_repeated_layers_give_identical_operators() -> None:
    record = trained("mlp")
    for kind in ("forward", "backward"):
        graph, _ = record.planned[kind][0].graph, record.planned[kind][1]
        computed: dict[int, list[object]] = {}
        for node in graph.nodes:
            if is_compute(node):
                computed.setdefault(operator_of(node), []).append(node.target)
        regions = [tuple(map(str, computed[number])) for number in sorted(computed)]
        assert regions[1:3] == regions[3:5], kind
