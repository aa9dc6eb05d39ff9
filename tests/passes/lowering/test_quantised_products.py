"""multiply_quantised: products with quantised matrices never have all of their values."""

from __future__ import annotations

import torch
from passes.building import Builder, aten

from zinf_fx import ops
from zinf_fx.passes.lowering.quantised_products import MultiplyQuantised
from zinf_fx.quantisation import quantised_shape


def test_golden() -> None:
    built = Builder("forward", {"w": quantised_shape((4, 64), "nf4")}, frozen=("w",), dtype=torch.uint8)
    x, g, bias = built.input(2, 64), built.input(2, 4), built.input(4)
    values = built.call(ops.dequantize, built.gather("w"), [64], "nf4", torch.float32)
    turned = built.call(aten.t.default, values)
    forward = built.call(aten.addmm.default, bias, x, turned)
    backward = built.call(aten.mm.default, g, built.call(aten.t.default, turned))
    other = built.call(aten.sum.default, values)
    built.returns(forward, backward, other)
    built.check(
        MultiplyQuantised(),
        after="""
        forward graph
        inputs
          w : u8[4, 36] on nvme
          %0 : f32[2, 64]
          %1 : f32[2, 4]
          %2 : f32[4]
        nodes
          %3 = gather w : u8[4, 36]
          %4 = zinf.dequantize(%3, [64], nf4, float32) : f32[4, 64]
          %5 = zinf.quantised_mm(%0, %3, 64, nf4, float32, True, bias=%2) : f32[2, 4]  # multiply_quantised
          %6 = zinf.quantised_mm(%1, %3, 64, nf4, float32, False) : f32[2, 64]  # multiply_quantised
          %7 = aten.sum(%4) : f32[]
        return %5, %6, %7
        """,
    )
