"""residency: what stays in memory between uses, within the budget, and above all what is used next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from gate import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from passes.building import Builder, aten
from passes.capturing import assert_trains_like_eager
from passes.models import CASES

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.passes.ir.framework import event_of, nodes_calling
from zinf_fx.passes.ir.in_flight import Ledger, operators_in, spans
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.scheduling.prefetch import Prefetch
from zinf_fx.passes.scheduling.residency import Gap, choose_residency, take
from zinf_fx.plan.lifetimes import Reuse
from zinf_fx.plan.schedule import PROLOGUE

KIB = 1024


def chain(kind: str, order: Sequence[str], budget: int | None, **options: object) -> Builder:
    """Each operator multiplies by a matrix of 1 KiB; a name may come more than once."""
    tiles = {name: (16, 16) for name in sorted(set(order))}
    built = Builder(kind, tiles, device_memory=budget, **options)
    x = built.input(2, 16)
    for name in order:
        x = built.call(aten.mm.default, x, built.gather(name))
    built.returns(x)
    built.run(SinkGathers(), Regions(), LowerGathers(), Prefetch(built.context.config.prefetch))
    return built


def decided(*graphs: Builder) -> None:
    for built, residency in zip(graphs, choose_residency([(b.graph, b.context) for b in graphs], spare=0), strict=True):
        built.check_values(residency)


def moved(built: Builder) -> list[str]:
    """Return the tiles that are fetched, less those found in memory."""
    fetches = nodes_calling(built.graph, ops.fetch)
    return [built.context.tile_of(n).name for n in fetches if not event_of(n).resident]


def test_golden() -> None:
    """The tied tile is used at both ends of the graph, and in the next one: there is room for one tile more."""
    built = chain("inference", ["tied", "a", "b", "tied"], 2 * KIB, prefetch=None)
    (residency,) = choose_residency([(built.graph, built.context)], spare=0)
    built.check(
        residency,
        after="""
        inference graph
        inputs
          a : f32[16, 16] on nvme, gradient on host
          b : f32[16, 16] on nvme, gradient on host
          tied : f32[16, 16] on nvme, gradient on host
          %0 : f32[2, 16]
        operator 0
          fetch tied resident  # lower_gathers
          upload tied resident  # lower_gathers
          allgather tied resident  # lower_gathers
          %1 = wait tied : f32[16, 16]  # lower_gathers
          %2 = aten.mm(%0, %1) : f32[2, 16]
          release tied resident  # lower_gathers
        operator 1
          fetch a  # lower_gathers
          upload a  # lower_gathers
          allgather a  # lower_gathers
          %3 = wait a : f32[16, 16]  # lower_gathers
          %4 = aten.mm(%2, %3) : f32[2, 16]
          release a  # lower_gathers
        operator 2
          fetch b  # lower_gathers
          upload b  # lower_gathers
          allgather b  # lower_gathers
          %5 = wait b : f32[16, 16]  # lower_gathers
          %6 = aten.mm(%4, %5) : f32[2, 16]
          release b  # lower_gathers
        operator 3
          fetch tied resident  # lower_gathers
          upload tied resident  # lower_gathers
          allgather tied resident  # lower_gathers
          %7 = wait tied : f32[16, 16]  # lower_gathers
          %8 = aten.mm(%6, %7) : f32[2, 16]
          release tied resident  # lower_gathers
        return %8
        """,
    )


def test_a_tied_tile_does_not_stay_through_the_graph_unless_the_budget_allows() -> None:
    built = chain("inference", ["tied", "a", "b", "tied"], KIB, prefetch=None)
    decided(built)
    assert moved(built) == ["a", "b", "tied"]  # it stays from the end of one call to the beginning of the next
    built = chain("inference", ["tied", "a", "b", "tied"], None)
    assert len(list(nodes_calling(built.graph, ops.release))) == 2 + 1  # without a budget it is there all the time


def test_the_turn_and_the_step() -> None:
    """Kept are the last tiles of forward for backward, and the last of backward for the next forward."""
    names = [f"w{i}" for i in range(8)]
    forward, backward = (
        chain("forward", names, 4 * KIB, prefetch=None),
        chain("backward", names[::-1], 4 * KIB, prefetch=None),
    )
    decided(forward, backward)
    assert moved(forward) == names[4:]
    assert moved(backward) == names[::-1][4:]


def test_what_stays_needs_no_turn() -> None:
    names = [f"w{i}" for i in range(6)]
    backward = chain("backward", names[::-1], 6 * KIB)
    forward = Builder("forward", {name: (16, 16) for name in names}, device_memory=6 * KIB)
    x = forward.input(2, 16)
    for name in names:
        x = forward.call(aten.mm.default, x, forward.gather(name))
    forward.returns(x)
    forward.knows(successor_prologue=Prefetch().prologue(backward.graph, backward.context))
    forward.run(SinkGathers(), Regions(), LowerGathers(), Prefetch())
    assert any(event_of(node).for_backward for node in nodes_calling(forward.graph, ops.fetch))
    decided(forward, backward)
    staying = {
        forward.context.tile_of(n).name for n in nodes_calling(forward.graph, ops.release) if event_of(n).resident
    }
    for_backward = {
        forward.context.tile_of(n).name for n in nodes_calling(forward.graph, ops.fetch) if event_of(n).for_backward
    }
    assert staying and not staying & for_backward


def test_small_parameters_stay_without_a_budget() -> None:
    built = Builder("inference", {"up.weight": (16, 16), "up.bias": (16,)})
    x = built.input(2, 16)
    built.returns(built.call(aten.addmm.default, built.gather("up.bias"), x, built.gather("up.weight")))
    built.run(SinkGathers(), Regions(), LowerGathers(), Prefetch())
    decided(built)
    assert moved(built) == ["up.weight"]


def test_nothing_stays_where_residency_is_off() -> None:
    built = chain("inference", ["a", "b", "a"], 8 * KIB, residency=False)
    decided(built)
    assert moved(built) == ["a", "b", "a"]


@pytest.mark.parametrize("budget", [3 * KIB, 5 * KIB, 9 * KIB])
@pytest.mark.parametrize("prefetch", [None, (1, 2, 3)])
def test_the_budget_holds(budget: int, prefetch: tuple[int, int, int] | None) -> None:
    names = [f"w{i}" for i in range(6)]
    graphs = [
        chain(kind, order, budget, prefetch=prefetch)
        for kind, order in (("forward", [*names, "w0"]), ("backward", names[::-1]))
    ]
    decided(*graphs)
    for built in graphs:
        count = operators_in(built.graph)
        ledger = Ledger(spans(built.graph, built.context), count, None)
        assert all(ledger.at(operator) <= budget for operator in range(PROLOGUE, count))


def _saved_at_most(gaps: Sequence[Gap], free: Sequence[int]) -> int:
    """Find it by trying everything."""
    for count in range(len(gaps), 0, -1):
        for chosen in itertools.combinations(gaps, count):
            left = list(free)
            if all(take(left, gap) for gap in chosen):
                return count
    return 0


@settings(max_examples=50, deadline=None)
@given(
    order=st.lists(st.integers(0, 4), min_size=2, max_size=12),
    free=st.lists(st.integers(0, 3), min_size=14, max_size=14),
)
def test_of_one_size_as_many_are_saved_as_can_be(order: list[int], free: list[int]) -> None:
    """Belady's choice is the optimum, also where the room differs from operator to operator."""
    uses: dict[int, list[int]] = {}
    for operator, name in enumerate(order):
        uses.setdefault(name, []).append(operator)
    pairs = [pair for of_tile in uses.values() for pair in itertools.pairwise(of_tile)]
    gaps = [Gap(Reuse(None, None, False), (range(a + 2, b + 1),), 1, False) for a, b in pairs]
    gaps.sort(key=lambda gap: gap.positions[0].stop)
    left = list(free)
    assert sum(take(left, gap) for gap in gaps) == _saved_at_most(gaps[:10], free) or len(gaps) > 10


@pytest.mark.parametrize(
    ("name", "budget"), [("tied_far_apart", "4KiB"), slow("mlp", "5KiB"), slow("tied_far_apart", "64KiB")]
)
def test_numerics(name: str, budget: str) -> None:
    model, inputs = CASES[name]()
    record = assert_trains_like_eager(model, *inputs, config=Config(placement="nvme", device_memory=budget))
    marked = [
        n for m, _ in record.planned.values() for n in nodes_calling(m.graph, ops.release) if event_of(n).resident
    ]
    assert marked
