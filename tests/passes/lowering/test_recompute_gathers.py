"""recompute_gathers: no weight, nor any view or copy of one, is saved for backward."""

from __future__ import annotations

import operator

import pytest
import torch
from gate import named
from passes.building import Builder, aten
from passes.models import CASES, IN_THE_GATE, trained
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx import ops
from zinf_fx.passes.activations.keep import KeepActivations
from zinf_fx.passes.ir.printer import print_graph
from zinf_fx.passes.ir.tile_values import tile_values
from zinf_fx.passes.lowering.recompute_gathers import RecomputeGathers


def test_golden() -> None:
    built = Builder("joint", {"a.weight": (4, 4), "b.weight": (4, 4), "bias": (4,)})
    x = built.input(2, 4)
    first, second, bias = built.gather("a.weight"), built.gather("b.weight"), built.gather("bias")
    both = built.call(aten.cat.default, [first, second])
    cast = built.call(aten._to_copy.default, built.call(aten.t.default, both), dtype=torch.float64)
    half = built.call(aten.split.Tensor, cast, 4, 1)
    part = built.call(operator.getitem, half, 0)
    moved = built.call(aten._to_copy.default, x, dtype=torch.float64)
    product = built.call(aten.mm.default, moved, part)
    shifted = built.call(aten.add.Tensor, built.call(aten.expand.default, bias, [2, 4]), product)
    doubled = built.call(aten.mul.Tensor, first, 2.0)
    built.returns(shifted, doubled, backward=0)
    built.check(
        KeepActivations(),
        RecomputeGathers(),
        before="""
        joint graph
        inputs
          a.weight : f32[4, 4] on nvme, gradient on host
          b.weight : f32[4, 4] on nvme, gradient on host
          bias : f32[4] on nvme, gradient on host
          %0 : f32[2, 4]
        nodes
          %1 = gather a.weight : f32[4, 4]
          %2 = gather b.weight : f32[4, 4]
          %3 = gather bias : f32[4]
          %4 = aten.cat([%1, %2]) : f32[8, 4]
          %5 = aten.t(%4) : f32[4, 8]
          %6 = aten._to_copy(%5, dtype=float64) : f64[4, 8]
          %7 = aten.split.Tensor(%6, 4, 1) : (f64[4, 4], f64[4, 4])
          %8 = %7[0] : f64[4, 4]
          %9 = aten._to_copy(%0, dtype=float64) : f64[2, 4]
          %10 = aten.mm(%9, %8) : f64[2, 4]
          %11 = aten.expand(%3, [2, 4]) : f32[2, 4]
          %12 = aten.add.Tensor(%11, %10) : f64[2, 4]
          %13 = aten.mul.Tensor(%1, 2.0) : f32[4, 4]
        return %12, %13
        return of backward
        """,
        after="""
        joint graph
        inputs
          a.weight : f32[4, 4] on nvme, gradient on host
          b.weight : f32[4, 4] on nvme, gradient on host
          bias : f32[4] on nvme, gradient on host
          %0 : f32[2, 4]
        nodes
          %1 = gather a.weight : f32[4, 4] [must_recompute]
          %2 = gather b.weight : f32[4, 4] [must_recompute]
          %3 = gather bias : f32[4] [must_recompute]
          %4 = aten.cat([%1, %2]) : f32[8, 4] [must_recompute]
          %5 = aten.t(%4) : f32[4, 8] [must_recompute]
          %6 = aten._to_copy(%5, dtype=float64) : f64[4, 8] [must_recompute]
          %7 = aten.split.Tensor(%6, 4, 1) : (f64[4, 4], f64[4, 4]) [must_recompute]
          %8 = %7[0] : f64[4, 4] [must_recompute]
          %9 = aten._to_copy(%0, dtype=float64) : f64[2, 4] [must_save]
          %10 = aten.mm(%9, %8) : f64[2, 4] [must_save]
          %11 = aten.expand(%3, [2, 4]) : f32[2, 4] [must_recompute]
          %12 = aten.add.Tensor(%11, %10) : f64[2, 4] [must_save]
          %13 = aten.mul.Tensor(%1, 2.0) : f32[4, 4] [must_save]
        return %12, %13
        return of backward
        """,
    )


def test_values_of_quantised_weights_are_made_again_too() -> None:
    built = Builder("joint", {"w": (4, 20)}, frozen=("w",), dtype=torch.uint8)
    values = built.call(ops.dequantize, built.gather("w"), [16], "int8", torch.float32)
    product = built.call(aten.mm.default, built.input(2, 16), built.call(aten.t.default, values))
    built.returns(product)
    built.check(
        KeepActivations(),
        RecomputeGathers(),
        after="""
        joint graph
        inputs
          w : u8[4, 20] on nvme
        nodes
          %0 = gather w : u8[4, 20] [must_recompute]
          %1 = zinf.dequantize(%0, [16], int8, float32) : f32[4, 16] [must_recompute]
        inputs
          %2 : f32[2, 16]
        nodes
          %3 = aten.t(%1) : f32[16, 4] [must_recompute]
          %4 = aten.mm(%2, %3) : f32[2, 4] [must_save]
        return %4
        return of backward
        """,
    )


def test_a_gather_is_no_border_of_a_checkpointed_region() -> None:
    built = Builder("joint", {"a.weight": (4, 4)})
    weight = built.gather("a.weight")
    weight.meta |= {"recompute": CheckpointPolicy.MUST_SAVE, "ac_graph_id": 1}
    built.returns(built.call(aten.sin.default, weight))
    built.run(KeepActivations(), RecomputeGathers())
    assert weight.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE and "ac_graph_id" not in weight.meta


@pytest.mark.parametrize("name", named(CASES, IN_THE_GATE))
def test_no_value_of_a_tile_is_saved(name: str) -> None:
    record = trained(name)
    if "forward" not in record.planned:
        return
    # Before gathers are lowered, a tile's value is what gathers, views and copies make of it.
    stage = record.stage("regions", "forward")
    values = tile_values(stage.after)
    (output,) = stage.after.find_nodes(op="output")
    count = record.joint[2]["num_fwd_outputs"]
    assert not values.keys() & set(output.args[0][count:]), print_graph(stage.after, stage.context_after)


def test_casts_of_autocast_are_repeated() -> None:
    stage = trained("autocast").stage("regions", "backward")
    casts = [n for n in tile_values(stage.after) if n.target is torch.ops.aten._to_copy.default]
    assert len(casts) == 4  # the weights of two blocks, two matrices each; biases are not needed again
