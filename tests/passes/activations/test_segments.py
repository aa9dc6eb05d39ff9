"""Where the forward part of a joint graph can be cut."""

from __future__ import annotations

import operator

import pytest
import torch
from gate import slow
from passes.building import Builder, aten
from passes.capturing import train
from passes.models import Block, Expression
from torch import nn

from zinf_fx.config import Config
from zinf_fx.passes.activations.segments import Segments
from zinf_fx.passes.ir.printer import type_text


def segments_of(model: nn.Module, *inputs: torch.Tensor) -> Segments:
    config = Config(placement="nvme", activations="recompute", pack=None)
    stage = train(model, *inputs, config=config).stage("recompute_activations")
    return Segments(stage.before, stage.context_before)


def stacks(count: int, width: int = 4) -> nn.Module:
    """Return an input projection, two stacks of numbered layers, and a head."""
    return Expression(
        lambda m, x: m.head(m.decoder(m.encoder(m.embed(x)))).sum(),
        embed=nn.Linear(3, width),
        encoder=nn.Sequential(*(Block(width) for _ in range(count))),
        decoder=nn.Sequential(*(Block(width, dropout=0.5) for _ in range(count))),
        head=nn.Linear(width, 5),
    )


@pytest.mark.parametrize("count", [slow(1), 3])
def test_layers_begin_where_only_the_stream_crosses(count: int) -> None:
    segments = segments_of(stacks(count), torch.randn(6, 3))
    cuts = segments.before_layers()
    assert len(cuts) == 2 * count and cuts == sorted(cuts)
    for cut in cuts:
        assert [type_text(node.meta["val"]) for node in segments.crossing[cut]] == ["f32[6, 4]"]
    between = segments.between(cuts)
    names = [{segments._context.tile_of(g).name for n in part for g in segments._parameters_of(n)} for part in between]
    assert all("embed" in name for name in names[0])
    assert all(name.startswith(f"encoder.{n}.") for n, part in enumerate(names[1 : count + 1]) for name in part)
    assert {name.partition(".")[0] for name in names[-1]} == {"decoder", "head"}


def test_layers_without_numbers() -> None:
    model = Expression(lambda m, x: m.b(m.a(x).relu()).sum(), a=nn.Linear(3, 4), b=nn.Linear(4, 5))
    assert segments_of(model, torch.randn(6, 3)).before_layers() == []


def test_a_cut_at_a_tuple_saves_its_members() -> None:
    built = Builder("joint", {"w": (8, 8)})
    x, weight = built.input(2, 8), built.gather("w")
    product = built.call(aten.mm.default, x, weight)
    norm = built.call(aten.native_layer_norm.default, product, [8], None, None, 1e-5)
    normed, mean, deviation = (built.call(operator.getitem, norm, number) for number in range(3))
    wide = built.call(aten.cat.default, [normed, normed])
    built.returns(built.call(aten.sum.default, wide), mean, backward=1)
    segments = Segments(built.graph, built.context)
    assert segments.forward[:3] == [product, norm, normed]
    assert segments.crossing[:3] == [[product], [normed], [normed]]
    assert segments.made[:3] == [[product], [normed, mean, deviation], []]
    assert segments.at_minima() == []


def test_masks_and_statistics_for_backward_go_with_what_computes_them() -> None:
    segments = segments_of(stacks(2), torch.randn(6, 3))
    assert "bool[6, 4]" in {type_text(node.meta["val"]) for node in segments.forward}
    for part in segments.between(segments.at_minima()):
        there = set(part)
        for node in part:
            if node.target.__name__ == "getitem":
                assert node.args[0] in there
