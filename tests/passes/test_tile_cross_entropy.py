"""tile_cross_entropy: a tiled head's logits are reduced range by range, and never whole."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from building import Builder, aten
from capturing import Record, assert_trains_like_eager
from models import Expression
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
    """The nodes of the planned graphs that compute as many values as there are logits."""
    return [
        node.format_node()
        for module, _ in record.planned.values()
        for node in module.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and math.prod(node.meta["val"].shape) >= ROWS * VOCABULARY
    ]


def config(tiles: int, dtype: torch.dtype = torch.float32) -> Config:
    return Config(placement="nvme", tile=-(-VOCABULARY // tiles) * WIDTH * dtype.itemsize)


def head_and_loss() -> Builder:
    """Two rows, two ranges of three words: logits, loss, and the gradients of the activation and of the head."""
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
          %5 = aten.ne.Scalar(%1, -100) : bool[2] [must_recompute]  # tile_cross_entropy
          %6 = aten.where.ScalarOther(%5, %1, 0) : i64[2] [must_recompute]  # tile_cross_entropy
          %7 = aten.mm(%0, %4) : f32[2, 3] [must_recompute]  # tile
          %8 = aten.lt.Scalar(%6, 3) : bool[2] [must_recompute]  # tile_cross_entropy
          %9 = aten.where.ScalarOther(%8, %6, 0) : i64[2] [must_recompute]  # tile_cross_entropy
          %10 = aten.unsqueeze(%9, 1) : i64[2, 1] [must_recompute]  # tile_cross_entropy
          %11 = aten.amax(%7, [1]) : f32[2]  # tile_cross_entropy
          %12 = aten.unsqueeze(%11, 1) : f32[2, 1]  # tile_cross_entropy
          %13 = aten.sub.Tensor(%7, %12) : f32[2, 3]  # tile_cross_entropy
          %14 = aten.exp(%13) : f32[2, 3]  # tile_cross_entropy
          %15 = aten.sum.dim_IntList(%14, [1]) : f32[2]  # tile_cross_entropy
          %16 = aten.gather(%7, 1, %10) : f32[2, 1]  # tile_cross_entropy
          %17 = aten.squeeze.dim(%16, 1) : f32[2]  # tile_cross_entropy
          %18 = gather head[3:6] : f32[3, 4]  # tile
          %19 = aten.t(%18) : f32[4, 3]  # tile
          %20 = aten.mm(%0, %19) : f32[2, 3] [must_recompute]  # tile
          %21 = aten.ge.Scalar(%6, 3) : bool[2] [must_recompute]  # tile_cross_entropy
          %22 = aten.sub.Tensor(%6, 3) : i64[2] [must_recompute]  # tile_cross_entropy
          %23 = aten.where.ScalarOther(%21, %22, 0) : i64[2] [must_recompute]  # tile_cross_entropy
          %24 = aten.unsqueeze(%23, 1) : i64[2, 1] [must_recompute]  # tile_cross_entropy
          %25 = aten.amax(%20, [1]) : f32[2]  # tile_cross_entropy
          %26 = aten.maximum(%11, %25) : f32[2]  # tile_cross_entropy
          %27 = aten.unsqueeze(%26, 1) : f32[2, 1]  # tile_cross_entropy
          %28 = aten.sub.Tensor(%20, %27) : f32[2, 3]  # tile_cross_entropy
          %29 = aten.exp(%28) : f32[2, 3]  # tile_cross_entropy
          %30 = aten.sum.dim_IntList(%29, [1]) : f32[2]  # tile_cross_entropy
          %31 = aten.sub.Tensor(%11, %26) : f32[2]  # tile_cross_entropy
          %32 = aten.exp(%31) : f32[2]  # tile_cross_entropy
          %33 = aten.mul.Tensor(%15, %32) : f32[2]  # tile_cross_entropy
          %34 = aten.add.Tensor(%30, %33) : f32[2]  # tile_cross_entropy
          %35 = aten.gather(%20, 1, %24) : f32[2, 1]  # tile_cross_entropy
          %36 = aten.squeeze.dim(%35, 1) : f32[2]  # tile_cross_entropy
          %37 = aten.where.self(%21, %36, %17) : f32[2]  # tile_cross_entropy
          %38 = aten.log(%34) : f32[2]  # tile_cross_entropy
          %39 = aten.add.Tensor(%26, %38) : f32[2]  # tile_cross_entropy
          %40 = aten._to_copy(%5, dtype=float32) : f32[2]  # tile_cross_entropy
          %41 = aten.sum(%40) : f32[]  # tile_cross_entropy
          %42 = aten.sub.Tensor(%39, %37) : f32[2]  # tile_cross_entropy
          %43 = aten.where.ScalarOther(%5, %42, 0.0) : f32[2]  # tile_cross_entropy
          %44 = aten.sum(%43) : f32[]  # tile_cross_entropy
          %45 = aten.div.Tensor(%44, %41) : f32[]  # tile_cross_entropy
          %46 = aten.div.Tensor(%2, %41) : f32[]  # tile_cross_entropy
          %47 = aten.where.ScalarOther(%5, %46, 0.0) : f32[2]  # tile_cross_entropy
          %48 = gather head[0:3] : f32[3, 4]  # tile
          %49 = aten.t(%48) : f32[4, 3]  # tile
          %50 = aten.t(%49) : f32[3, 4]  # tile
          %51 = aten.unsqueeze(%39, 1) : f32[2, 1] [must_recompute]  # tile_cross_entropy
          %52 = aten.sub.Tensor(%7, %51) : f32[2, 3] [must_recompute]  # tile_cross_entropy
          %53 = aten.exp(%52) : f32[2, 3] [must_recompute]  # tile_cross_entropy
          %54 = aten.unsqueeze(%47, 1) : f32[2, 1]  # tile_cross_entropy
          %55 = aten.mul.Tensor(%53, %54) : f32[2, 3]  # tile_cross_entropy
          %56 = aten.where.ScalarOther(%8, %47, 0.0) : f32[2]  # tile_cross_entropy
          %57 = aten.unsqueeze(%56, 1) : f32[2, 1]  # tile_cross_entropy
          %58 = aten.neg(%57) : f32[2, 1]  # tile_cross_entropy
          %59 = aten.scatter_add(%55, 1, %10, %58) : f32[2, 3]  # tile_cross_entropy
          %60 = aten.mm(%59, %50) : f32[2, 4]  # tile
          %61 = aten.t(%59) : f32[3, 2]  # tile
          %62 = aten.mm(%61, %0) : f32[3, 4]  # tile
          %63 = gather head[3:6] : f32[3, 4]  # tile
          %64 = aten.t(%63) : f32[4, 3]  # tile
          %65 = aten.t(%64) : f32[3, 4]  # tile
          %66 = aten.unsqueeze(%39, 1) : f32[2, 1] [must_recompute]  # tile_cross_entropy
          %67 = aten.sub.Tensor(%20, %66) : f32[2, 3] [must_recompute]  # tile_cross_entropy
          %68 = aten.exp(%67) : f32[2, 3] [must_recompute]  # tile_cross_entropy
          %69 = aten.unsqueeze(%47, 1) : f32[2, 1]  # tile_cross_entropy
          %70 = aten.mul.Tensor(%68, %69) : f32[2, 3]  # tile_cross_entropy
          %71 = aten.where.ScalarOther(%21, %47, 0.0) : f32[2]  # tile_cross_entropy
          %72 = aten.unsqueeze(%71, 1) : f32[2, 1]  # tile_cross_entropy
          %73 = aten.neg(%72) : f32[2, 1]  # tile_cross_entropy
          %74 = aten.scatter_add(%70, 1, %24, %73) : f32[2, 3]  # tile_cross_entropy
          %75 = aten.mm(%74, %65) : f32[2, 4]  # tile
          %76 = aten.add.Tensor(%60, %75) : f32[2, 4]  # tile
          %77 = aten.t(%74) : f32[3, 2]  # tile
          %78 = aten.mm(%77, %0) : f32[3, 4]  # tile
          %79 = aten.cat([%62, %78]) : f32[6, 4]  # tile
        return %45
        return of backward %76, %79
        """,
    )


@pytest.mark.parametrize(("reduction", "tiles"), [("mean", 2), ("mean", 7), ("sum", 3), ("none", 7)])
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
