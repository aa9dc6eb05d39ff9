"""Bytes in flight count what is to be counted, for as long as it is in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from passes.building import Builder, aten

from zinf_fx import ops
from zinf_fx.passes.ir.framework import OPERATOR, give_event
from zinf_fx.passes.ir.in_flight import InFlight, Ledger, operators_in, spans
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.offload_gradients import OffloadGradients
from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.plan.schedule import PROLOGUE

KIB = 1024


def backward() -> Builder:
    """Build two operators: the gradient of `a` is made in the first, that of `b` in the second."""
    built = Builder("backward", {"a": (16, 16), "b": (16, 32)})
    tangent = built.input(16, 16, name="tangents_1")
    da = built.call(aten.mm.default, tangent, built.gather("a"))
    db = built.call(aten.mm.default, da, built.gather("b"))
    built.returns(da, db, gradients={0: "a", 1: "b"}, backward=2)
    built.run(ReduceGradients(), SinkGathers(), Regions(), LowerGathers(), OffloadGradients())
    return built


def parts_in_flight(built: Builder) -> set[tuple[str, int, int, int]]:
    return {(s.what.replace("'", ""), s.nbytes, s.first, s.last) for s in spans(built.graph, built.context)}


def test_tiles_and_gradients() -> None:
    built = backward()
    assert operators_in(built.graph) == 2
    assert parts_in_flight(built) == {
        ("tile a", KIB, 0, 0),
        ("gradient of a", KIB, 0, 0),
        ("tile b", 2 * KIB, 1, 1),
        ("gradient of b", 2 * KIB, 1, 1),
    }


def test_what_lives_on_the_device_is_not_in_flight() -> None:
    built = backward()
    tiles = built.context.tiles.items()
    built.knows(tiles={token: replace(tile, tier="device", gradient_tier="device") for token, tile in tiles})
    assert not parts_in_flight(built)


@pytest.mark.parametrize(
    ("for_backward", "parts"),
    [
        (3, {(0, 1), (3, 3)}),  # after the release
        (1, {(0, 3)}),  # while the graph holds it anyway, and after
        (PROLOGUE, {(PROLOGUE, 3)}),  # before, while, and after
    ],
)
def test_a_tile_that_is_fetched_again_for_backward_counts_once(for_backward: int, parts: set[tuple[int, int]]) -> None:
    built = Builder("forward", {"a": (16, 16), "b": (16, 16), "c": (16, 16)})
    x = built.input(16, 16)
    for name in ("a", "b", "a"):
        x = built.call(aten.mm.default, x, built.gather(name))
    x = built.call(aten.mm.default, x, built.gather("c"))
    built.returns(built.call(aten.mm.default, x, x))
    built.run(SinkGathers(), Regions(), LowerGathers())
    built.graph.find_nodes(op="output")[0].prev.meta[OPERATOR] = 3  # one operator more, at the end
    (last,) = built.graph.find_nodes(op="output")
    with built.graph.inserting_before(last):
        give_event(
            built.graph.call_function(ops.fetch, (built.token("a"),)), built.context, for_backward, for_backward=True
        )
    assert {part[2:] for part in parts_in_flight(built) if part[0] == "tile a"} == parts


def test_ledger() -> None:
    ledger = Ledger([InFlight("tile", KIB, PROLOGUE, 1), InFlight("gradient", KIB, 1, 2)], operators=4, budget=2 * KIB)
    assert [ledger.at(operator) for operator in range(PROLOGUE, 4)] == [KIB, KIB, 2 * KIB, KIB, 0]
    assert ledger.over_budget() is None
    assert [s.what for s in ledger.largest(1)] == ["tile", "gradient"]
    assert ledger.extend(KIB, end=3, wanted=PROLOGUE) == 2  # operator 1 is full
    assert ledger.extend(KIB, end=0, wanted=PROLOGUE) == PROLOGUE
    assert ledger.extend(KIB, end=2, wanted=3) == 3
    assert [ledger.at(operator) for operator in range(PROLOGUE, 4)] == [2 * KIB, KIB, 2 * KIB, 2 * KIB, KIB]
    assert not ledger.take(KIB, 1) and ledger.take(KIB, 3)


def test_ledger_over_budget() -> None:
    entries = [InFlight("tile", KIB, 0, 1), InFlight("tile", KIB, 1, 2)]
    assert Ledger(entries, operators=3, budget=2 * KIB - 1).over_budget() == 1
    assert Ledger(entries, operators=3, budget=None).over_budget() is None
    assert Ledger([], operators=0, budget=1).over_budget() is None
