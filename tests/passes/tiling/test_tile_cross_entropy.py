"""tile_cross_entropy: a tiled head's logits are reduced range by range, and never whole."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from gate import slow
from passes.building import Builder, aten
from passes.capturing import Record, assert_trains_like_eager
from passes.models import Expression
from torch import nn
from torch.nn import functional as F

from zinf_fx.config import Config
from zinf_fx.passes.tiling.tile import TileParameters
from zinf_fx.passes.tiling.tile_cross_entropy import TileCrossEntropy

ROWS, WIDTH, VOCABULARY = 6, 8, 50


def head(
    reduction: str = "mean", dtype: torch.dtype = torch.float32, ignored: int = -100, bias: bool = False
) -> nn.Module:
    def loss(m: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = m.head(m.body(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, target.flatten(), reduction=reduction, ignore_index=ignored).sum()

    torch.manual_seed(0)
    return Expression(loss, body=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, VOCABULARY, bias=bias)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, ROWS // 2, WIDTH, generator=generator).to(dtype)
    return x, torch.randint(0, VOCABULARY, (2, ROWS // 2), generator=generator)


def whole_logits(record: Record) -> list[str]:
    """Return the nodes of the planned graphs that compute as many values as there are logits."""
    return [
        node.format_node()
        for module, _ in record.planned.values()
        for node in module.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and math.prod(node.meta["val"].shape) >= ROWS * VOCABULARY
    ]


def config(tiles: int, dtype: torch.dtype = torch.float32) -> Config:
    return Config(placement="nvme", tile=-(-VOCABULARY // tiles) * WIDTH * dtype.itemsize)


def head_and_loss() -> Builder:
    """Build two rows and two ranges of three words: logits, loss, and the gradients of the activation and of the
    head."""
    built = Builder("joint", {"head": (6, 4)})
    x, target = built.input(2, 4), built.input(2, name="primals_y", dtype=torch.int64)
    tangent = built.input(name="tangents_1")
    weight = built.call(aten.t.default, built.gather("head"))
    scores = built.call(aten._log_softmax.default, built.call(aten.mm.default, x, weight), 1, False)
    loss = built.call(aten.nll_loss_forward.default, scores, target, None, 1, -100)
    mean, count = (built.call(operator.getitem, loss, index) for index in range(2))
    back = built.call(aten.nll_loss_backward.default, tangent, scores, target, None, 1, -100, count)
    back = built.call(aten._log_softmax_backward_data.default, back, scores, 1, torch.float32)
    dw = built.call(aten.mm.default, built.call(aten.t.default, back), x)
    dx = built.call(aten.mm.default, back, built.call(aten.t.default, weight))
    built.returns(mean, dx, dw, gradients={1: "head"}, backward=2)
    return built


def test_golden() -> None:
    head_and_loss().check(
        TileParameters(48),
        TileCrossEntropy(),
        after="""
        joint graph
        inputs
          head : f32[6, 4] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : i64[2]
          %2 : f32[]
        nodes
          %3 = gather head[0:3] : f32[3, 4]  # tile
          %4 = aten.t(%3) : f32[4, 3]  # tile
          %5 = aten.unsqueeze(%1, 1) : i64[2, 1] [must_recompute]  # tile_cross_entropy
          %6 = aten.ne.Scalar(%5, -100) : bool[2, 1] [must_recompute]  # tile_cross_entropy
          %7 = aten.where.ScalarOther(%6, %5, 0) : i64[2, 1] [must_recompute]  # tile_cross_entropy
          %8 = aten.mm(%0, %4) : f32[2, 3] [must_recompute]  # tile
          %9 = aten.lt.Scalar(%7, 3) : bool[2, 1] [must_recompute]  # tile_cross_entropy
          %10 = aten.where.ScalarOther(%9, %7, 0) : i64[2, 1] [must_recompute]  # tile_cross_entropy
          %11 = aten.logsumexp(%8, [1], True) : f32[2, 1]  # tile_cross_entropy
          %12 = aten.gather(%8, 1, %10) : f32[2, 1]  # tile_cross_entropy
          %13 = gather head[3:6] : f32[3, 4]  # tile
          %14 = aten.t(%13) : f32[4, 3]  # tile
          %15 = aten.mm(%0, %14) : f32[2, 3] [must_recompute]  # tile
          %16 = aten.ge.Scalar(%7, 3) : bool[2, 1] [must_recompute]  # tile_cross_entropy
          %17 = aten.sub.Tensor(%7, 3) : i64[2, 1] [must_recompute]  # tile_cross_entropy
          %18 = aten.where.ScalarOther(%16, %17, 0) : i64[2, 1] [must_recompute]  # tile_cross_entropy
          %19 = aten.logsumexp(%15, [1], True) : f32[2, 1]  # tile_cross_entropy
          %20 = aten.gather(%15, 1, %18) : f32[2, 1]  # tile_cross_entropy
          %21 = aten.logaddexp(%11, %19) : f32[2, 1]  # tile_cross_entropy
          %22 = aten.where.self(%16, %20, %12) : f32[2, 1]  # tile_cross_entropy
          %23 = aten._to_copy(%6, dtype=float32) : f32[2, 1]  # tile_cross_entropy
          %24 = aten.sum(%23) : f32[]  # tile_cross_entropy
          %25 = aten.sub.Tensor(%21, %22) : f32[2, 1]  # tile_cross_entropy
          %26 = aten.where.ScalarOther(%6, %25, 0.0) : f32[2, 1]  # tile_cross_entropy
          %27 = aten.sum(%26) : f32[]  # tile_cross_entropy
          %28 = aten.div.Tensor(%27, %24) : f32[]  # tile_cross_entropy
          %29 = aten.div.Tensor(%2, %24) : f32[]  # tile_cross_entropy
          %30 = aten.where.ScalarOther(%6, %29, 0.0) : f32[2, 1]  # tile_cross_entropy
          %31 = gather head[0:3] : f32[3, 4]  # tile
          %32 = aten.t(%31) : f32[4, 3]  # tile
          %33 = aten.t(%32) : f32[3, 4]  # tile
          %34 = aten.sub.Tensor(%8, %21) : f32[2, 3] [must_recompute]  # tile_cross_entropy
          %35 = aten.exp(%34) : f32[2, 3] [must_recompute]  # tile_cross_entropy
          %36 = aten.mul.Tensor(%35, %30) : f32[2, 3]  # tile_cross_entropy
          %37 = aten.where.ScalarOther(%9, %30, 0.0) : f32[2, 1]  # tile_cross_entropy
          %38 = aten.neg(%37) : f32[2, 1]  # tile_cross_entropy
          %39 = aten.scatter_add(%36, 1, %10, %38) : f32[2, 3]  # tile_cross_entropy
          %40 = aten.mm(%39, %33) : f32[2, 4]  # tile
          %41 = aten.t(%39) : f32[3, 2]  # tile
          %42 = aten.mm(%41, %0) : f32[3, 4]  # tile
          %43 = gather head[3:6] : f32[3, 4]  # tile
          %44 = aten.t(%43) : f32[4, 3]  # tile
          %45 = aten.t(%44) : f32[3, 4]  # tile
          %46 = aten.sub.Tensor(%15, %21) : f32[2, 3] [must_recompute]  # tile_cross_entropy
          %47 = aten.exp(%46) : f32[2, 3] [must_recompute]  # tile_cross_entropy
          %48 = aten.mul.Tensor(%47, %30) : f32[2, 3]  # tile_cross_entropy
          %49 = aten.where.ScalarOther(%16, %30, 0.0) : f32[2, 1]  # tile_cross_entropy
          %50 = aten.neg(%49) : f32[2, 1]  # tile_cross_entropy
          %51 = aten.scatter_add(%48, 1, %18, %50) : f32[2, 3]  # tile_cross_entropy
          %52 = aten.mm(%51, %45) : f32[2, 4]  # tile
          %53 = aten.add.Tensor(%40, %52) : f32[2, 4]  # tile
          %54 = aten.t(%51) : f32[3, 2]  # tile
          %55 = aten.mm(%54, %0) : f32[3, 4]  # tile
          %56 = aten.cat([%42, %55]) : f32[6, 4]  # tile
        return %28
        return of backward %53, %56
        """,
    )


@pytest.mark.parametrize(("reduction", "tiles"), [slow("mean", 2), ("mean", 7), slow("sum", 3), ("none", 7)])
def test_numerics(reduction: str, tiles: int) -> None:
    record = assert_trains_like_eager(head(reduction), *batch(), config=config(tiles))
    assert not whole_logits(record)


def test_numerics_in_low_precision() -> None:
    record = assert_trains_like_eager(
        head(dtype=torch.bfloat16), *batch(torch.bfloat16), config=config(3, torch.bfloat16)
    )
    assert not whole_logits(record)


def test_targets_that_are_ignored() -> None:
    x, target = batch()
    target[0, 1] = target[1, 2] = -100
    assert not whole_logits(assert_trains_like_eager(head(), x, target, config=config(3)))
    target[target < 0] = 7
    assert not whole_logits(assert_trains_like_eager(head(ignored=7), x, target, config=config(3)))


def test_large_logits_do_not_overflow() -> None:
    model = head()
    with torch.no_grad():
        model.head.weight.mul_(1000)
    record = assert_trains_like_eager(model, *batch(), config=config(4), tolerance=1e-3)
    assert not whole_logits(record)


def test_logits_that_are_used_otherwise_stay_whole() -> None:
    def loss(m: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = m.head(x).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten()) + logits.square().mean()

    record = assert_trains_like_eager(
        Expression(loss, head=nn.Linear(WIDTH, VOCABULARY, bias=False)), *batch(), config=config(3)
    )
    assert whole_logits(record)
    # The gradient of a bias is a sum over the whole gradient of the logits.
    assert whole_logits(assert_trains_like_eager(head(bias=True), *batch(), config=config(3)))
