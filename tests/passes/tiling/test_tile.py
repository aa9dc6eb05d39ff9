"""tile: a large parameter becomes a sequence of ranges of its rows, forward and backward together."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from gate import slow
from passes.building import Builder, aten
from passes.capturing import assert_trains_like_eager
from passes.models import CASES

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.passes.ir.framework import TileKey
from zinf_fx.passes.ir.gradient_parts import assemblies
from zinf_fx.passes.tiling.tile import TileParameters, divided
from zinf_fx.plan.schedule import Tile


def test_a_linear_layer() -> None:
    """Output and weight gradient are put together from their ranges; the input gradient is their sum."""
    built = Builder("joint", {"up.weight": (6, 4), "up.bias": (6,)})
    x, dy = built.input(2, 4), built.input(2, 6, name="tangents_1")
    weight = built.call(aten.t.default, built.gather("up.weight"))
    y = built.call(aten.addmm.default, built.gather("up.bias"), x, weight)
    product = built.call(aten.mm.default, built.call(aten.t.default, dy), x)
    dw = built.call(aten.t.default, built.call(aten.t.default, product))
    dx = built.call(aten.mm.default, dy, built.call(aten.t.default, weight))
    db = built.call(aten.sum.dim_IntList, dy, [0])
    built.returns(y, dw, db, dx, gradients={0: "up.weight", 1: "up.bias"}, backward=3)
    built.check(
        TileParameters(64),
        after="""
        joint graph
        inputs
          up.weight : f32[6, 4] on nvme, gradient on host
          up.bias : f32[6] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : f32[2, 6]
        nodes
          %2 = gather up.bias : f32[6]
          %3 = gather up.weight[0:3] : f32[3, 4]  # tile
          %4 = aten.t(%3) : f32[4, 3]  # tile
          %5 = aten.slice.Tensor(%2, 0, 0, 3) : f32[3]  # tile
          %6 = aten.addmm(%5, %0, %4) : f32[2, 3]  # tile
          %7 = gather up.weight[3:6] : f32[3, 4]  # tile
          %8 = aten.t(%7) : f32[4, 3]  # tile
          %9 = aten.slice.Tensor(%2, 0, 3, 6) : f32[3]  # tile
          %10 = aten.addmm(%9, %0, %8) : f32[2, 3]  # tile
          %11 = aten.cat([%6, %10], 1) : f32[2, 6]  # tile
          %12 = gather up.weight[0:3] : f32[3, 4]  # tile
          %13 = aten.t(%12) : f32[4, 3]  # tile
          %14 = aten.t(%13) : f32[3, 4]  # tile
          %15 = aten.slice.Tensor(%1, 1, 0, 3) : f32[2, 3]  # tile
          %16 = aten.mm(%15, %14) : f32[2, 4]  # tile
          %17 = aten.slice.Tensor(%1, 1, 0, 3) : f32[2, 3]  # tile
          %18 = aten.t(%17) : f32[3, 2]  # tile
          %19 = aten.mm(%18, %0) : f32[3, 4]  # tile
          %20 = aten.t(%19) : f32[4, 3]  # tile
          %21 = aten.t(%20) : f32[3, 4]  # tile
          %22 = gather up.weight[3:6] : f32[3, 4]  # tile
          %23 = aten.t(%22) : f32[4, 3]  # tile
          %24 = aten.t(%23) : f32[3, 4]  # tile
          %25 = aten.slice.Tensor(%1, 1, 3, 6) : f32[2, 3]  # tile
          %26 = aten.mm(%25, %24) : f32[2, 4]  # tile
          %27 = aten.add.Tensor(%16, %26) : f32[2, 4]  # tile
          %28 = aten.slice.Tensor(%1, 1, 3, 6) : f32[2, 3]  # tile
          %29 = aten.t(%28) : f32[3, 2]  # tile
          %30 = aten.mm(%29, %0) : f32[3, 4]  # tile
          %31 = aten.t(%30) : f32[4, 3]  # tile
          %32 = aten.t(%31) : f32[3, 4]  # tile
          %33 = aten.sum.dim_IntList(%1, [0]) : f32[6]
          %34 = aten.cat([%21, %32]) : f32[6, 4]  # tile
        return %11
        return of backward %34, %33, %27
        """,
    )


def test_a_quantised_weight() -> None:
    """Each range of its rows is dequantised by itself, with the scales that lie in it."""
    built = Builder("joint", {"w": (6, 36)}, frozen=("w",), dtype=torch.uint8)
    x, dy = built.input(2, 64), built.input(2, 6, name="tangents_1")
    values = built.call(ops.dequantize, built.gather("w"), [64], "nf4", torch.float32)
    weight = built.call(aten.t.default, values)
    y = built.call(aten.mm.default, x, weight)
    dx = built.call(aten.mm.default, dy, built.call(aten.t.default, weight))
    built.returns(y, dx, backward=1)
    built.check(
        TileParameters(4 * 36),
        after="""
        joint graph
        inputs
          w : u8[6, 36] on nvme
          %0 : f32[2, 64]
          %1 : f32[2, 6]
        nodes
          %2 = gather w[0:3] : u8[3, 36]  # tile
          %3 = zinf.dequantize(%2, [64], nf4, float32) : f32[3, 64]  # tile
          %4 = aten.t(%3) : f32[64, 3]  # tile
          %5 = aten.mm(%0, %4) : f32[2, 3]  # tile
          %6 = gather w[3:6] : u8[3, 36]  # tile
          %7 = zinf.dequantize(%6, [64], nf4, float32) : f32[3, 64]  # tile
          %8 = aten.t(%7) : f32[64, 3]  # tile
          %9 = aten.mm(%0, %8) : f32[2, 3]  # tile
          %10 = aten.cat([%5, %9], 1) : f32[2, 6]  # tile
          %11 = gather w[0:3] : u8[3, 36]  # tile
          %12 = zinf.dequantize(%11, [64], nf4, float32) : f32[3, 64]  # tile
          %13 = aten.t(%12) : f32[64, 3]  # tile
          %14 = aten.t(%13) : f32[3, 64]  # tile
          %15 = aten.slice.Tensor(%1, 1, 0, 3) : f32[2, 3]  # tile
          %16 = aten.mm(%15, %14) : f32[2, 64]  # tile
          %17 = gather w[3:6] : u8[3, 36]  # tile
          %18 = zinf.dequantize(%17, [64], nf4, float32) : f32[3, 64]  # tile
          %19 = aten.t(%18) : f32[64, 3]  # tile
          %20 = aten.t(%19) : f32[3, 64]  # tile
          %21 = aten.slice.Tensor(%1, 1, 3, 6) : f32[2, 3]  # tile
          %22 = aten.mm(%21, %20) : f32[2, 64]  # tile
          %23 = aten.add.Tensor(%16, %22) : f32[2, 64]  # tile
        return %10
        return of backward %23
        """,
    )


def test_a_weight_whose_rows_are_summed_over() -> None:
    """The output is the sum of the ranges', in fp32."""
    built = Builder("joint", {"w": (4, 6)}, dtype=torch.bfloat16)
    x = built.input(2, 4, dtype=torch.bfloat16)
    dy = built.input(2, 6, name="tangents_1", dtype=torch.bfloat16)
    weight = built.gather("w")
    y = built.call(aten.mm.default, x, weight)
    dx = built.call(aten.mm.default, dy, built.call(aten.t.default, weight))
    dw = built.call(aten.mm.default, built.call(aten.t.default, x), dy)
    built.returns(y, dx, dw, gradients={1: "w"}, backward=2)
    built.check(
        TileParameters(24),
        after="""
        joint graph
        inputs
          w : bf16[4, 6] on nvme, gradient on host
          %0 : bf16[2, 4]
          %1 : bf16[2, 6]
        nodes
          %2 = gather w[0:2] : bf16[2, 6]  # tile
          %3 = aten.slice.Tensor(%0, 1, 0, 2) : bf16[2, 2]  # tile
          %4 = aten.mm(%3, %2) : bf16[2, 6]  # tile
          %5 = aten._to_copy(%4, dtype=float32) : f32[2, 6]  # tile
          %6 = gather w[2:4] : bf16[2, 6]  # tile
          %7 = aten.slice.Tensor(%0, 1, 2, 4) : bf16[2, 2]  # tile
          %8 = aten.mm(%7, %6) : bf16[2, 6]  # tile
          %9 = aten.add.Tensor(%5, %8) : f32[2, 6]  # tile
          %10 = aten._to_copy(%9, dtype=bfloat16) : bf16[2, 6]  # tile
          %11 = gather w[0:2] : bf16[2, 6]  # tile
          %12 = aten.t(%11) : bf16[6, 2]  # tile
          %13 = aten.mm(%1, %12) : bf16[2, 2]  # tile
          %14 = aten.slice.Tensor(%0, 1, 0, 2) : bf16[2, 2]  # tile
          %15 = aten.t(%14) : bf16[2, 2]  # tile
          %16 = aten.mm(%15, %1) : bf16[2, 6]  # tile
          %17 = gather w[2:4] : bf16[2, 6]  # tile
          %18 = aten.t(%17) : bf16[6, 2]  # tile
          %19 = aten.mm(%1, %18) : bf16[2, 2]  # tile
          %20 = aten.slice.Tensor(%0, 1, 2, 4) : bf16[2, 2]  # tile
          %21 = aten.t(%20) : bf16[2, 2]  # tile
          %22 = aten.mm(%21, %1) : bf16[2, 6]  # tile
          %23 = aten.cat([%13, %19], 1) : bf16[2, 4]  # tile
          %24 = aten.cat([%16, %22]) : bf16[4, 6]  # tile
        return %10
        return of backward %23, %24
        """,
    )


@pytest.mark.parametrize("transposed", [slow(False), True])
def test_a_gradient_of_many_uses(transposed: bool) -> None:
    """Their sum is deeper than Python's stack."""
    uses = 300
    built = Builder("joint", {"up.weight": (4, 4)})
    x, dy = built.input(2, 4), built.input(2, 4, name="tangents_1")
    y = built.call(aten.mm.default, x, built.gather("up.weight"))
    term = built.call(aten.mm.default, built.call(aten.t.default, x), dy)
    total = term
    for _ in range(uses - 1):
        total = built.call(aten.add.Tensor, total, term)
    built.returns(y, built.call(aten.t.default, total) if transposed else total, gradients={0: "up.weight"}, backward=1)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + uses)
    try:
        context = TileParameters(32)(built.graph, built.context)
        assembled = assemblies(built.graph, context)
    finally:
        sys.setrecursionlimit(limit)
    products = [node for node in built.graph.nodes if node.target is aten.mm.default]
    assert len(products) == 2 + 2 * uses and term not in products
    assert len(assembled) == (1 if transposed else 2 * uses - 1)


def test_tied_embedding_and_head() -> None:
    """Each use contributes to the gradient of each range."""
    built = Builder("joint", {"table": (5, 4)})
    tokens = built.input(3, dtype=torch.int64, name="primals_tokens")
    dy = built.input(3, 5, name="tangents_1")
    table = built.gather("table")
    x = built.call(aten.embedding.default, table, tokens, 2)
    head = built.call(aten.t.default, table)
    y = built.call(aten.mm.default, x, head)
    dw = built.call(aten.mm.default, built.call(aten.t.default, dy), x)
    dx = built.call(aten.mm.default, dy, built.call(aten.t.default, head))
    de = built.call(aten.embedding_dense_backward.default, dx, tokens, 5, 2, False)
    built.returns(y, built.call(aten.add.Tensor, dw, de), gradients={0: "table"}, backward=1)
    built.check(
        TileParameters(48),
        after="""
        joint graph
        inputs
          table : f32[5, 4] on nvme, gradient on host
          %0 : i64[3]
          %1 : f32[3, 5]
        nodes
          %2 = aten.lt.Scalar(%0, 3) : bool[3] [must_recompute]  # tile
          %3 = aten.where.ScalarOther(%2, %0, 0) : i64[3] [must_recompute]  # tile
          %4 = gather table[0:3] : f32[3, 4]  # tile
          %5 = aten.embedding(%4, %3) : f32[3, 4]  # tile
          %6 = aten.ge.Scalar(%0, 3) : bool[3] [must_recompute]  # tile
          %7 = aten.sub.Tensor(%0, 3) : i64[3] [must_recompute]  # tile
          %8 = aten.where.ScalarOther(%6, %7, 0) : i64[3] [must_recompute]  # tile
          %9 = gather table[3:5] : f32[2, 4]  # tile
          %10 = aten.embedding(%9, %8) : f32[3, 4]  # tile
          %11 = aten.unsqueeze(%6, -1) : bool[3, 1]  # tile
          %12 = aten.where.self(%11, %10, %5) : f32[3, 4]  # tile
          %13 = gather table[0:3] : f32[3, 4]  # tile
          %14 = aten.t(%13) : f32[4, 3]  # tile
          %15 = aten.mm(%12, %14) : f32[3, 3]  # tile
          %16 = gather table[3:5] : f32[2, 4]  # tile
          %17 = aten.t(%16) : f32[4, 2]  # tile
          %18 = aten.mm(%12, %17) : f32[3, 2]  # tile
          %19 = aten.cat([%15, %18], 1) : f32[3, 5]  # tile
          %20 = gather table[0:3] : f32[3, 4]  # tile
          %21 = aten.t(%20) : f32[4, 3]  # tile
          %22 = aten.t(%21) : f32[3, 4]  # tile
          %23 = aten.slice.Tensor(%1, 1, 0, 3) : f32[3, 3]  # tile
          %24 = aten.mm(%23, %22) : f32[3, 4]  # tile
          %25 = aten.slice.Tensor(%1, 1, 0, 3) : f32[3, 3]  # tile
          %26 = aten.t(%25) : f32[3, 3]  # tile
          %27 = aten.mm(%26, %12) : f32[3, 4]  # tile
          %28 = gather table[3:5] : f32[2, 4]  # tile
          %29 = aten.t(%28) : f32[4, 2]  # tile
          %30 = aten.t(%29) : f32[2, 4]  # tile
          %31 = aten.slice.Tensor(%1, 1, 3, 5) : f32[3, 2]  # tile
          %32 = aten.mm(%31, %30) : f32[3, 4]  # tile
          %33 = aten.add.Tensor(%24, %32) : f32[3, 4]  # tile
          %34 = aten.lt.Scalar(%0, 3) : bool[3] [must_recompute]  # tile
          %35 = aten.where.ScalarOther(%34, %0, -1) : i64[3] [must_recompute]  # tile
          %36 = aten.eq.Scalar(%0, 2) : bool[3] [must_recompute]  # tile
          %37 = aten.masked_fill.Scalar(%35, %36, -1) : i64[3] [must_recompute]  # tile
          %38 = aten.embedding_dense_backward(%33, %37, 3, -1, False) : f32[3, 4]  # tile
          %39 = aten.ge.Scalar(%0, 3) : bool[3] [must_recompute]  # tile
          %40 = aten.sub.Tensor(%0, 3) : i64[3] [must_recompute]  # tile
          %41 = aten.where.ScalarOther(%39, %40, -1) : i64[3] [must_recompute]  # tile
          %42 = aten.embedding_dense_backward(%33, %41, 2, -1, False) : f32[2, 4]  # tile
          %43 = aten.slice.Tensor(%1, 1, 3, 5) : f32[3, 2]  # tile
          %44 = aten.t(%43) : f32[2, 3]  # tile
          %45 = aten.mm(%44, %12) : f32[2, 4]  # tile
          %46 = aten.cat([%27, %45]) : f32[5, 4]  # tile
          %47 = aten.cat([%38, %42]) : f32[5, 4]  # tile
          %48 = aten.add.Tensor(%46, %47) : f32[5, 4]  # tile
        return %19
        return of backward %48
        """,
    )


def test_a_batch_of_matrices_is_divided_into_batches() -> None:
    built = Builder("joint", {"experts": (4, 3, 2)})
    x, dy = built.input(4, 5, 3), built.input(4, 5, 2, name="tangents_1")
    experts = built.gather("experts")
    y = built.call(aten.bmm.default, x, experts)
    dx = built.call(aten.bmm.default, dy, built.call(aten.transpose.int, experts, 1, 2))
    dw = built.call(aten.bmm.default, built.call(aten.transpose.int, x, 1, 2), dy)
    built.returns(y, dx, dw, gradients={1: "experts"}, backward=2)
    built.check_values(TileParameters(48))
    assert [tile.label for tile in built.context.divided["primals_1"]] == ["experts[0:2]", "experts[2:4]"]


def test_a_use_that_can_not_be_divided_leaves_the_parameter_whole() -> None:
    built = Builder("joint", {"w": (4, 4)})
    weight = built.gather("w")
    y = built.call(aten.mm.default, built.input(2, 4), weight)
    built.returns(y, built.call(aten.sin.default, weight), backward=0)
    before = built.text
    built.run(TileParameters(16))
    assert built.text == before
    assert built.context.undivided == {"primals_1": "aten.sin computes with it"}


DIVISIONS = {
    "fits": ((8, 4), 128, [8]),
    "even": ((8, 4), 64, [4, 4]),
    "as even as can be": ((10, 4), 48, [3, 3, 3, 1]),
    "less than a row": ((3, 4), 1, [1, 1, 1]),
    "whole blocks": ((1000, 64), 70000, [256, 256, 256, 232]),
    "a vector": ((100,), 8, [100]),
}


@pytest.mark.parametrize(("shape", "limit", "rows"), DIVISIONS.values(), ids=DIVISIONS)
def test_divided(shape: tuple[int, ...], limit: int, rows: list[int]) -> None:
    tiles = divided(Tile("w", shape, torch.float32, "nvme", "host"), limit)
    assert [tile.shape[0] for tile in tiles] == rows
    assert [TileKey("w", tile.start).start * 4 for tile in tiles] == [
        sum(tile.nbytes for tile in tiles[:number]) for number in range(len(tiles))
    ]


# Tiles of two rows and a last one, of models whose parameters are used or have gradients in ways of their own; slowly,
# of all. Of a row each, of some that use their parameters in other ways.
IN_THE_GATE = (
    "split_and_unbind_of_a_weight",
    "views_of_views",
    "concatenated_weights",
    "frozen",
    "one_gradient_for_two",
    "gradient_is_a_view_of_a_weight",
    "bias_only_in_forward",
    "weight_as_reshaped_copy",
)
LIMITS = [
    *((name, 40) if name in IN_THE_GATE else slow(name, 40) for name in CASES),
    *((name, 16) for name in ("branch_of_two_convolutions", "low_rank_update")),
    *(slow(name, 16) for name in ("attention", "tied_far_apart")),
]


@pytest.mark.parametrize(("name", "limit"), LIMITS)
def test_trains_like_eager(name: str, limit: int) -> None:
    model, inputs = CASES[name]()
    tolerance = 0.02 if name == "autocast" else 1e-4
    assert_trains_like_eager(model, *inputs, config=Config(placement="infinity-nvme", tile=limit), tolerance=tolerance)
