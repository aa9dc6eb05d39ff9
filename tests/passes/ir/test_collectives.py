"""What functional collectives read is there until they are over, and what they make is not there before."""

from __future__ import annotations

import torch
from passes.building import Builder, aten

from zinf_fx import ops
from zinf_fx.passes.activations.segments import Segments
from zinf_fx.passes.ir.aliases import aliased_inputs, is_view_node, memory_node, readers_of
from zinf_fx.passes.ir.collectives import WAIT, collectives_of, group_of, is_collective
from zinf_fx.passes.ir.fingerprint import lines_of
from zinf_fx.passes.pipeline import lowering

functional = torch.ops._c10d_functional


def test_what_waits_makes_memory_of_its_own() -> None:
    built = Builder()
    x = built.input(4, 4)
    sum_of = built.call(functional.all_reduce.default, x, "sum", "tp")
    result = built.call(WAIT, sum_of)
    again = built.call(WAIT, x)  # of what is no collective's result
    assert is_collective(sum_of) and not is_collective(result) and group_of(sum_of) == "tp"
    assert aliased_inputs(result) == [] and not is_view_node(result) and memory_node(result) is result
    assert aliased_inputs(again) == [x] and is_view_node(again)
    assert readers_of(x)[:3] == [x, sum_of, again] and result in readers_of(x)


def test_a_tile_stays_until_the_collective_that_reads_it_is_over() -> None:
    built = Builder(tiles={"w": (4, 4)}, residency=False)
    x = built.input(4, 4)
    gathered = built.call(functional.all_gather_into_tensor.default, built.gather("w"), 2, "tp")
    between = built.call(aten.relu.default, x)
    whole = built.call(WAIT, gathered)
    built.returns(built.call(aten.mm.default, whole, between))
    built.run(*lowering())
    order = list(built.graph.nodes)
    (release,) = (node for node in order if node.target is ops.release)
    assert order[order.index(whole) + 1] is release


def test_segments_end_behind_a_collective_and_never_within() -> None:
    built = Builder("joint")
    x = built.input(8, 8)
    node = built.call(aten.relu.default, built.call(aten.cat.default, [x, x]))
    small = built.call(aten.mm.default, built.call(aten.slice.Tensor, node, 0, 0, 2), x)
    started = built.call(functional.all_reduce.default, small, "sum", "tp")
    whole = built.call(WAIT, started)
    large = built.call(aten.cat.default, [whole, whole, whole])
    result = built.call(aten.relu.default, large)
    built.returns(result)
    segments = Segments(built.graph, built.context)
    assert not any(started in crossing for crossing in segments.crossing)
    cuts = [segments.forward[position] for position in segments.at_minima()]
    assert whole in cuts and started not in cuts and small not in cuts


def test_a_fingerprint_does_not_tell_which_ranks_a_group_has() -> None:
    texts = []
    for names in (("3", "4"), ("7", "8")):
        built = Builder()
        x = built.input(4)
        for name in (*names, names[0]):
            x = built.call(WAIT, built.call(functional.all_reduce.default, x, "sum", name))
        built.returns(x)
        assert len(collectives_of(built.graph)) == 3
        texts.append(lines_of(built.graph, built.context))
    assert texts[0] == texts[1]
    assert [line.count("group 0") - line.count("group 1") for line in texts[0] if "all_reduce" in line] == [1, -1, 1]
