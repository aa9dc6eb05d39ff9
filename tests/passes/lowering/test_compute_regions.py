"""compute_regions: what an operator computes between two events is one node, and the events stay in their order."""

from __future__ import annotations

import operator

import pytest
import torch
from gate import slow
from passes.building import Builder, aten
from passes.capturing import train
from passes.models import Block
from torch import Tensor, nn

from zinf_fx.config import Config
from zinf_fx.passes.ir.framework import events_in
from zinf_fx.passes.lowering.compute_regions import FormRegions, Region
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.pipeline import run_passes

LOWERING = (SinkGathers(), Regions(), LowerGathers())


def lowered(tier: str = "nvme") -> Builder:
    """Return a norm, a product, and a dropout of half of what comes of it, which multiplies the other half."""
    built = Builder("forward", {"norm": (4,), "a": (4, 4)})
    built.knows(tiles={token: built.moved(tile, tier) for token, tile in built.context.tiles.items()})
    x = built.input(2, 3, 4)
    normed = built.call(aten.native_layer_norm.default, x, [4], built.gather("norm"), None, 1e-5)
    normed = built.call(operator.getitem, normed, 0)
    flat = built.call(aten.view.default, built.call(aten.mul.Tensor, normed, x), [6, 4])
    product = built.call(aten.mm.default, flat, built.call(aten.t.default, built.gather("a")))
    wide = built.call(aten.relu.default, built.call(aten.view.default, product, [2, 3, 4]))
    halves = built.call(aten.split.Tensor, built.call(aten.exp.default, wide), 2, 2)
    halves = [built.call(operator.getitem, halves, number) for number in (0, 1)]
    dropped = built.call(operator.getitem, built.call(aten.native_dropout.default, halves[0], 0.5, True), 0)
    gated = built.call(aten.mul.Tensor, dropped, halves[1])
    built.returns(built.call(aten.sum.default, gated), halves[1])
    built.run(*LOWERING)
    return built


def regions_of(built: Builder) -> list[Region]:
    return [node.target for node in built.graph.nodes if isinstance(node.target, Region)]


def test_golden_of_tiles_that_move() -> None:
    """What is freed after its use ends a run of operations; one operation stays by itself."""
    built = lowered()
    events = events_in(built.graph)
    built.check(
        FormRegions(),
        after="""
        forward graph
        inputs
          norm : f32[4] on nvme, gradient on nvme
          a : f32[4, 4] on nvme, gradient on nvme
          %0 : f32[2, 3, 4]
        operator 0
          fetch norm  # lower_gathers
          upload norm  # lower_gathers
          allgather norm  # lower_gathers
          %1 = wait norm : f32[4]  # lower_gathers
          %2 = aten.native_layer_norm(%0, [4], %1, None, 1e-05) : (f32[2, 3, 4], f32[2, 3, 1], f32[2, 3, 1])
          %3 = %2[0] : f32[2, 3, 4]
          release norm  # lower_gathers
          %4 = aten.mul.Tensor(%3, %0) : f32[2, 3, 4]
          %5 = aten.view(%4, [6, 4]) : f32[6, 4]
        operator 1
          fetch a  # lower_gathers
          upload a  # lower_gathers
          allgather a  # lower_gathers
          %6 = wait a : f32[4, 4]  # lower_gathers
          %7 = aten.t(%6) : f32[4, 4]
          %8 = aten.mm(%5, %7) : f32[6, 4]
          release a  # lower_gathers
          %9 = region(%8) : (f32[2, 3, 4])  # compute_regions
          %10 = %9[0] : f32[2, 3, 4]  # compute_regions
          %11 = aten.split.Tensor(%10, 2, 2) : (f32[2, 3, 2], f32[2, 3, 2])
          %12 = %11[0] : f32[2, 3, 2]
          %13 = %11[1] : f32[2, 3, 2]
          %14 = aten.native_dropout(%12, 0.5, True) : (f32[2, 3, 2], bool[2, 3, 2])
          %15 = %14[0] : f32[2, 3, 2]
          %16 = region(%15, %13) : (f32[])  # compute_regions
          %17 = %16[0] : f32[]  # compute_regions
        return %17, %13
        """,
    )
    assert events_in(built.graph) == events


def test_golden_of_tiles_that_stay() -> None:
    """Nothing is freed, so that an operator's operations are one region, up to the one that draws random numbers."""
    built = lowered("device")
    events = events_in(built.graph)
    built.check(
        FormRegions(),
        after="""
        forward graph
        inputs
          norm : f32[4] on device, gradient on device, states on nvme
          a : f32[4, 4] on device, gradient on device, states on nvme
          %0 : f32[2, 3, 4]
        operator 0
          fetch norm  # lower_gathers
          upload norm  # lower_gathers
          allgather norm  # lower_gathers
          %1 = wait norm : f32[4]  # lower_gathers
          %2 = region(%0, %1) : (f32[2, 3, 4])  # compute_regions
          %3 = %2[0] : f32[2, 3, 4]  # compute_regions
          release norm  # lower_gathers
        operator 1
          fetch a  # lower_gathers
          upload a  # lower_gathers
          allgather a  # lower_gathers
          %4 = wait a : f32[4, 4]  # lower_gathers
          %5 = region(%3, %4) : (f32[2, 3, 4])  # compute_regions
          %6 = %5[0] : f32[2, 3, 4]  # compute_regions
          release a  # lower_gathers
          %7 = aten.split.Tensor(%6, 2, 2) : (f32[2, 3, 2], f32[2, 3, 2])
          %8 = %7[0] : f32[2, 3, 2]
          %9 = %7[1] : f32[2, 3, 2]
          %10 = aten.native_dropout(%8, 0.5, True) : (f32[2, 3, 2], bool[2, 3, 2])
          %11 = %10[0] : f32[2, 3, 2]
          %12 = region(%11, %9) : (f32[])  # compute_regions
          %13 = %12[0] : f32[]  # compute_regions
        return %13, %9
        """,
    )
    assert events_in(built.graph) == events
    assert regions_of(built)[1].text == TEXT.strip()


TEXT = """
input_0: torch.float32 (2, 3, 4) (12, 4, 1) cpu
input_1: torch.float32 (4, 4) (4, 1) cpu
value_0 = aten.view.default((input_0, [6, 4]), {})
value_1 = aten.t.default((input_1,), {})
value_2 = aten.mm.default((value_0, value_1), {})
value_3 = aten.view.default((value_2, [2, 3, 4]), {})
value_4 = aten.relu.default((value_3,), {})
value_5 = aten.exp.default((value_4,), {})
output = output(((value_5,),), {})
"""


def test_equal_layers_have_equal_regions_whatever_is_between_them() -> None:
    built = Builder("forward", {name: (4, 4) for name in "abcd"})
    built.knows(tiles={token: built.moved(tile, "device") for token, tile in built.context.tiles.items()})
    y = built.input(2, 4)
    for number, name in enumerate("abcd"):
        y = built.call(aten.relu.default, built.call(aten.mm.default, y, built.gather(name)))
        y = built.call(aten.div.Tensor if number == 2 else aten.mul.Tensor, y, 2)
    built.returns(y)
    built.run(*LOWERING, FormRegions())
    texts = [region.text for region in regions_of(built)]
    assert texts[0] == texts[1] == texts[3] != texts[2]


def test_regions_that_compute_with_other_parts_are_equal() -> None:
    built = Builder("forward")
    x = built.input(6, 4)
    parts = [built.call(aten.slice.Tensor, x, 0, start, start + 2) for start in (0, 2, 4)]
    results = [built.call(aten.exp.default, built.call(aten.relu.default, part)) for part in parts]
    for number, result in enumerate(results):  # no two of them are of one run
        built.call(aten.copy_.default, parts[number], result)
    built.returns(*results)
    built.run(*LOWERING)
    built.check_values(FormRegions())
    assert len({region.text for region in regions_of(built)}) == 1


@pytest.mark.parametrize("pack", [slow(None), "auto"])
def test_a_deeper_model_has_no_other_regions(pack: str | None) -> None:
    """It has none whether each parameter moves by itself, or those of all layers together, in one operator."""

    def texts(layers: int) -> set[str]:
        model = nn.Sequential(*(Block(8) for _ in range(layers)), Sum())
        record = train(model, torch.randn(3, 8), config=Config(placement="infinity-nvme", pack=pack))
        for module, context in record.planned.values():
            run_passes(module.graph, context, [FormRegions()])
        regions = (n.target for module, _ in record.planned.values() for n in module.graph.nodes)
        return {region.text for region in regions if isinstance(region, Region)}

    assert texts(4) == texts(6)


class Sum(nn.Module):
    """The end of a model, which makes a scalar."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


def test_a_write_is_seen_by_what_comes_after_it_alone() -> None:
    """A region neither moves over an operation that writes to its input, nor takes it."""
    built = Builder("forward")
    x, y = built.input(2, 4), built.input(2, 4, name="primals_y")
    before = built.call(aten.exp.default, built.call(aten.relu.default, x))
    built.call(aten.copy_.default, x, built.call(aten.neg.default, y))
    after = built.call(aten.exp.default, built.call(aten.relu.default, x))
    built.returns(before, built.call(aten.add.Tensor, before, after))
    built.run(*LOWERING)
    built.check_values(FormRegions())
    assert (
        len(regions_of(built)) == 2 and len(built.graph.find_nodes(op="call_function", target=aten.copy_.default)) == 1
    )


def test_members_of_a_result_are_of_the_region_that_computes_it() -> None:
    built = Builder("forward", {"norm": (4,)})
    x = built.input(2, 4)
    normed = built.call(aten.native_layer_norm.default, built.call(aten.exp.default, x), [4], None, None, 1e-5)
    doubled = built.call(aten.mul.Tensor, built.gather("norm"), 2)
    mean, reciprocal = (built.call(operator.getitem, normed, number) for number in (1, 2))
    built.returns(doubled, mean, built.call(torch.ops.aten.neg.default, reciprocal))
    built.run(*LOWERING)
    built.check_values(FormRegions())
    assert all(node.meta["val"] is not None for node in built.graph.nodes if "val" in node.meta)
    assert [len(region.module.graph.output_node().args[0]) for region in regions_of(built)] == [2]


def test_what_writes_by_index_stays_by_itself() -> None:
    built = Builder("forward", {"norm": (4,)})
    x, rows = built.input(6, 4), built.input(6, name="rows", dtype=torch.int64)
    doubled = built.call(aten.mul.Tensor, built.call(aten.exp.default, x), built.gather("norm"))
    added = built.call(aten.embedding_dense_backward.default, doubled, rows, 8, -1, False)
    put = built.call(aten.index_put.default, added, [rows], doubled, True)
    put = built.call(aten.unfold_backward.default, built.call(aten.unfold.default, put, 0, 4, 2), [8, 4], 0, 4, 2)
    built.returns(built.call(aten.exp.default, built.call(aten.relu.default, put)))
    built.run(*LOWERING, FormRegions())
    inside = {node.target for region in regions_of(built) for node in region.module.graph.nodes}
    assert {aten.exp.default, aten.relu.default} <= inside
    writing = {aten.embedding_dense_backward.default, aten.index_put.default, aten.unfold_backward.default}
    assert not inside & writing
