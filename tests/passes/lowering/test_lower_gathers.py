"""lower_gathers: one live range per tile; the release follows the last use of it or of what shares it."""

from __future__ import annotations

import operator

import pytest
import torch
from passes.building import Builder, aten
from torch import fx

from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers

PASSES = (SinkGathers(), Regions(), LowerGathers())


def test_golden() -> None:
    built = Builder("forward", {"a": (4, 4), "b": (4, 4)})
    x = built.input(2, 4)
    y = built.call(aten.mm.default, x, built.gather("a"))
    z = built.call(aten.mm.default, y, built.gather("b"))
    z = built.call(aten.relu.default, z)
    built.returns(z)
    built.check(
        *PASSES,
        before="""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
        nodes
          %1 = gather a : f32[4, 4]
          %2 = aten.mm(%0, %1) : f32[2, 4]
          %3 = gather b : f32[4, 4]
          %4 = aten.mm(%2, %3) : f32[2, 4]
          %5 = aten.relu(%4) : f32[2, 4]
        return %5
        """,
        after="""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
        operator 0
          fetch a  # lower_gathers
          upload a  # lower_gathers
          allgather a  # lower_gathers
          %1 = wait a : f32[4, 4]  # lower_gathers
          %2 = aten.mm(%0, %1) : f32[2, 4]
          release a  # lower_gathers
        operator 1
          fetch b  # lower_gathers
          upload b  # lower_gathers
          allgather b  # lower_gathers
          %3 = wait b : f32[4, 4]  # lower_gathers
          %4 = aten.mm(%2, %3) : f32[2, 4]
          release b  # lower_gathers
          %5 = aten.relu(%4) : f32[2, 4]
        return %5
        """,
    )


def test_a_tile_used_twice_and_far_apart_is_fetched_once() -> None:
    built = Builder("forward", {"tied": (4, 4), "b": (4, 4)})
    x = built.input(2, 4)
    y = built.call(aten.mm.default, x, built.gather("tied"))
    y = built.call(aten.mm.default, y, built.gather("b"))
    y = built.call(aten.mm.default, y, built.call(aten.t.default, built.gather("tied")))
    built.returns(built.call(aten.relu.default, y))
    built.check(
        *PASSES,
        after="""
        forward graph
        inputs
          tied : f32[4, 4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
        operator 0
          fetch tied  # lower_gathers
          upload tied  # lower_gathers
          allgather tied  # lower_gathers
          %1 = wait tied : f32[4, 4]  # lower_gathers
          %2 = aten.mm(%0, %1) : f32[2, 4]
        operator 1
          fetch b  # lower_gathers
          upload b  # lower_gathers
          allgather b  # lower_gathers
          %3 = wait b : f32[4, 4]  # lower_gathers
          %4 = aten.mm(%2, %3) : f32[2, 4]
          release b  # lower_gathers
          %5 = aten.t(%1) : f32[4, 4]
          %6 = aten.mm(%4, %5) : f32[2, 4]
          release tied  # lower_gathers
          %7 = aten.relu(%6) : f32[2, 4]
        return %7
        """,
    )


def test_a_member_of_a_tuple_keeps_the_tile() -> None:
    built = Builder("forward", {"both": (8, 4), "b": (4, 4)})
    x = built.input(2, 4)
    halves = built.call(aten.split.Tensor, built.gather("both"), 4)
    first = built.call(operator.getitem, halves, 0)
    second = built.call(operator.getitem, halves, 1)
    y = built.call(aten.mm.default, x, first)
    y = built.call(aten.mm.default, y, built.gather("b"))
    y = built.call(aten.mm.default, y, second)
    built.returns(built.call(aten.relu.default, y))
    built.check(
        *PASSES,
        after="""
        forward graph
        inputs
          both : f32[8, 4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
        operator 0
          fetch both  # lower_gathers
          upload both  # lower_gathers
          allgather both  # lower_gathers
          %1 = wait both : f32[8, 4]  # lower_gathers
          %2 = aten.split.Tensor(%1, 4) : (f32[4, 4], f32[4, 4])
          %3 = %2[0] : f32[4, 4]
          %4 = aten.mm(%0, %3) : f32[2, 4]
        operator 1
          fetch b  # lower_gathers
          upload b  # lower_gathers
          allgather b  # lower_gathers
          %5 = wait b : f32[4, 4]  # lower_gathers
          %6 = aten.mm(%4, %5) : f32[2, 4]
          release b  # lower_gathers
          %7 = %2[1] : f32[4, 4]
          %8 = aten.mm(%6, %7) : f32[2, 4]
          release both  # lower_gathers
          %9 = aten.relu(%8) : f32[2, 4]
        return %9
        """,
    )


def test_a_result_that_aliases_a_tile_is_cloned() -> None:
    built = Builder("forward", {"a": (4, 4)})
    x = built.input(2, 4)
    a = built.gather("a")
    y = built.call(aten.mm.default, x, a)
    built.returns(built.call(aten.t.default, a), y, a)
    built.check(
        *PASSES,
        after="""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
        operator 0
          fetch a  # lower_gathers
          upload a  # lower_gathers
          allgather a  # lower_gathers
          %1 = wait a : f32[4, 4]  # lower_gathers
          %2 = aten.clone(%1) : f32[4, 4]  # lower_gathers
          %3 = aten.mm(%0, %1) : f32[2, 4]
          %4 = aten.t(%1) : f32[4, 4]
          %5 = aten.clone(%4) : f32[4, 4]  # lower_gathers
          release a  # lower_gathers
        return %5, %3, %2
        """,
    )


def test_a_gradient_that_aliases_a_tile_is_cloned() -> None:
    built = Builder("backward", {"a": (4, 4), "b": (4, 4)})
    b = built.call(aten.t.default, built.gather("b"))
    built.returns(b, None, gradients={0: "a"}, backward=2)
    built.run(ReduceGradients())
    built.check(
        *PASSES,
        after="""
        backward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
        operator 0
          fetch b  # lower_gathers
          upload b  # lower_gathers
          allgather b  # lower_gathers
          %0 = wait b : f32[4, 4]  # lower_gathers
          %1 = aten.t(%0) : f32[4, 4]
          %2 = aten.clone(%1) : f32[4, 4]  # lower_gathers
          release b  # lower_gathers
          %3 = reduce_scatter a, %2 : f32[4, 4]  # reduce_gradients
        return %3, None
        """,
    )


def test_what_leaves_in_many_ways_is_cloned_once() -> None:
    """It leaves as a result, twice, and as the gradient of two tiles: the release comes after the one clone."""
    built = Builder("backward", {"a": (4, 4), "b": (4, 4), "c": (4, 4)})
    c = built.gather("c")
    built.returns(c, c, c, c, gradients={0: "a", 1: "b"}, backward=4)
    built.run(ReduceGradients())
    built.check(
        *PASSES,
        after="""
        backward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          b : f32[4, 4] on nvme, gradient on host
          c : f32[4, 4] on nvme, gradient on host
        operator 0
          fetch c  # lower_gathers
          upload c  # lower_gathers
          allgather c  # lower_gathers
          %0 = wait c : f32[4, 4]  # lower_gathers
          %1 = aten.clone(%0) : f32[4, 4]  # lower_gathers
          release c  # lower_gathers
          %2 = reduce_scatter b, %1 : f32[4, 4]  # reduce_gradients
          %3 = reduce_scatter a, %1 : f32[4, 4]  # reduce_gradients
        return %3, %2, %1, %1
        """,
    )


def test_an_unused_gather_vanishes() -> None:
    built = Builder("forward", {"a": (4, 4)})
    x = built.input(2, 4)
    built.gather("a")
    built.returns(built.call(aten.sin.default, x))
    built.check(
        *PASSES,
        after="""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
        operator 0
          %1 = aten.sin(%0) : f32[2, 4]
        return %1
        """,
    )


def _views() -> dict[str, object]:
    """Make, from the value of a tile of shape (4, 4), something that shares its memory."""
    return {
        "view of a view": lambda b, w: b.call(aten.view.default, b.call(aten.view.default, w, [16]), [2, 8]),
        "_unsafe_view": lambda b, w: b.call(aten._unsafe_view.default, w, [2, 8]),
        "_reshape_alias": lambda b, w: b.call(aten._reshape_alias.default, w, [2, 8], [8, 1]),
        "expand of select": lambda b, w: b.call(aten.expand.default, b.call(aten.select.int, w, 0, 1), [2, 4]),
        "unbind": lambda b, w: b.call(operator.getitem, b.call(aten.unbind.int, w), 3),
        "split of chunk": lambda b, w: b.call(
            operator.getitem,
            b.call(aten.split_with_sizes.default, b.call(aten.slice.Tensor, w, 0, 1, 4), [1, 2]),
            1,
        ),
        "detach": lambda b, w: b.call(aten.detach.default, b.call(aten.alias.default, w)),
    }


@pytest.mark.parametrize("how", _views())
def test_the_release_follows_the_last_use_of_a_view(how: str) -> None:
    built = Builder("forward", {"a": (4, 4), "b": (4, 4)})
    x = built.input(2, 4)
    view = _views()[how](built, built.gather("a"))
    y = built.call(aten.mm.default, x, built.gather("b"))
    built.returns(built.call(aten.add.Tensor, built.call(aten.sum.default, view), y))
    built.run(*PASSES)
    names = [_name(node) for node in built.graph.nodes]
    assert names.index("release a") > max(i for i, n in enumerate(names) if n == "aten.sum.default")


def _name(node: fx.Node) -> str:
    release = node.target is torch.ops.zinf.release.default
    return f"release {'ab'[int(node.args[0].name[-1]) - 1]}" if release else str(node.target)
