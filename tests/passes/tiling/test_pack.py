"""pack: small parameters of one kind are gathered as one tile, and their gradients leave together."""

from __future__ import annotations

import pytest
import torch
from gate import named
from passes.building import Builder, aten
from passes.capturing import assert_trains_like_eager
from passes.models import CASES

from zinf_fx.config import Config
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.tiling.pack import PackParameters
from zinf_fx.plan.packs import in_packs, pack_limit, starts_of
from zinf_fx.sizes import PAGE


def two_layers(kind: str = "forward", **shapes: tuple[int, ...]) -> Builder:
    built = Builder(kind, {"a": (4, 4), "large": (64, 64), "b": (4,), **shapes})
    x = built.input(2, 4)
    y = built.call(aten.mm.default, x, built.gather("a"))
    y = built.call(aten.add.Tensor, y, built.gather("b"))
    return built, y


def test_golden() -> None:
    built, y = two_layers()
    built.returns(y)
    built.check(
        PackParameters(2 * PAGE),
        SinkGathers(),
        Regions(),
        LowerGathers(),
        before="""
        forward graph
        inputs
          a : f32[4, 4] on nvme, gradient on host
          large : f32[64, 64] on nvme, gradient on host
          b : f32[4] on nvme, gradient on host
          %0 : f32[2, 4]
        nodes
          %1 = gather a : f32[4, 4]
          %2 = aten.mm(%0, %1) : f32[2, 4]
          %3 = gather b : f32[4]
          %4 = aten.add.Tensor(%2, %3) : f32[2, 4]
        return %4
        """,
        after="""
        forward graph
        inputs
          a
          large : f32[64, 64] on nvme, gradient on host
          b
          %0 : f32[2, 4]
        prologue
          a and 1 other = pack a, b  # pack
        operator 0
          fetch a and 1 other  # lower_gathers
          upload a and 1 other  # lower_gathers
          allgather a and 1 other  # lower_gathers
          %1 = wait a and 1 other : f32[2048]  # lower_gathers
          %2 = a in %1 : f32[4, 4]  # pack
          %3 = aten.mm(%0, %2) : f32[2, 4]
          %4 = b in %1 : f32[4]  # pack
          %5 = aten.add.Tensor(%3, %4) : f32[2, 4]
          release a and 1 other  # lower_gathers
        return %5
        """,
    )


def test_gradients_leave_together() -> None:
    built, y = two_layers("joint")
    gradient = built.call(aten.mul.Tensor, y, 2.0)
    of_b = built.call(aten.sum.dim_IntList, gradient, [0])
    of_a = built.call(aten.mm.default, built.call(aten.t.default, y), gradient)
    built.returns(y, of_b, of_a, None, gradients={0: "b", 1: "a"}, backward=3)
    built.check_values(PackParameters(2 * PAGE))
    assert built.context.gradients == {1: "pack_default"}
    assert "together([" in built.text and built.text.rstrip().endswith("return of backward None, %10, None")


@pytest.mark.parametrize("limit", [PAGE, 2 * PAGE - 1])
def test_what_does_not_fit_together_stays_alone(limit: int) -> None:
    built, y = two_layers()
    built.returns(y)
    before = built.text
    built.run(PackParameters(limit))
    assert built.text == before


def test_only_one_kind_is_together() -> None:
    """Frozen and trained parameters, written ones, and those on other tiers are each by themselves."""
    built = Builder("forward", {"a": (4,), "b": (4,), "c": (4,), "d": (4,), "e": (4,)}, frozen=("b", "e"))
    values = [built.gather(name) for name in "abcde"]
    built.returns(built.call(aten.cat.default, [built.call(aten.relu.default, value) for value in values]))
    built.knows(written={built.token("c").name: 1})
    built.run(PackParameters(1 << 20))
    packs = [[member.name for member in tile.members] for tile in built.context.tiles.values() if tile.members]
    assert packs == [["a", "d"], ["b", "e"]]


# Where gradients, aliases or writes could go wrong in packs; of the other models, slow tests.
IN_THE_GATE = (
    "mlp",
    "tied_far_apart",
    "views_of_views",
    "frozen",
    "one_gradient_for_two",
    "gradient_is_the_tangent",
    "gradient_is_a_view_of_a_weight",
    "gradient_without_a_tangent",
    "bias_only_in_forward",
)


@pytest.mark.parametrize("name", named(CASES, IN_THE_GATE))
def test_every_model_trains_like_eager_in_packs(name: str) -> None:
    model, inputs = CASES[name]()
    assert_trains_like_eager(model, *inputs, config=Config(placement="infinity-nvme", pack="auto"))


def test_in_packs() -> None:
    things = [("a", 1, 3), ("b", 2, 3), ("c", 1, 4), ("d", 1, 9), ("e", 1, 4), ("f", 2, 7), ("g", 1, 8)]
    assert in_packs(things, 8) == [["a", "c"]]
    assert in_packs(things, 11) == [["a", "c"], ["b", "f"]]  # d is in a pack of its own
    assert in_packs(things, 2) == []


def test_limits_and_starts() -> None:
    for copied, largest in ((False, 4 << 20), (True, 32 << 20)):
        assert pack_limit(Config(pack=None), copied=copied) is None
        assert pack_limit(Config(pack="1MiB"), copied=copied) == 1 << 20
        assert pack_limit(Config(pack="auto"), copied=copied) == largest
        assert pack_limit(Config(pack="auto", device_memory="64MiB", host_memory="1GiB"), copied=copied) == 1 << 20
    assert starts_of([1, 2048, 2049], torch.bfloat16) == [0, 2048, 4096, 8192]
