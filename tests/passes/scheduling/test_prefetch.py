"""prefetch: every transfer as far ahead of its use as the distances and the budget allow."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from gate import named, slow
from passes.building import Builder, aten
from passes.capturing import Record, assert_trains_like_eager, train
from passes.models import Expression
from torch import nn

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.errors import PlanError
from zinf_fx.passes.ir.framework import PrologueTransfer, event_of, nodes_calling, operator_of
from zinf_fx.passes.ir.in_flight import Ledger, operators_in, spans
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.offload_gradients import OffloadGradients
from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.scheduling.prefetch import Prefetch
from zinf_fx.plan.schedule import PROLOGUE

DISTANCES = [(1, 2, 3), (0, 0, 0), (0, 0, 1), (0, 1, 2), (2, 2, 2), (1, 4, 9)]
KIB = 1024


def chain(count: int, size: int = 16, kind: str = "forward", **options: object) -> Builder:
    """`count` operators; each multiplies by a matrix of its own, 1 KiB by default."""
    built = Builder(kind, {f"w{i}": (size, size) for i in range(count)}, **options)
    x = built.input(2, size)
    for i in range(count):
        x = built.call(aten.mm.default, x, built.gather(f"w{i}"))
    built.returns(x)
    built.run(SinkGathers(), Regions(), LowerGathers())
    return built


def places(built: Builder, op: object, for_backward: bool = False) -> dict[str, int]:
    """By tile, the operator in which `op` stands."""
    nodes = nodes_calling(built.graph, op)
    return {built.context.tile_of(n).name: operator_of(n) for n in nodes if event_of(n).for_backward == for_backward}


def peak(built: Builder) -> int:
    ledger = Ledger(spans(built.graph, built.context), operators_in(built.graph), None)
    return max(ledger.at(operator) for operator in range(PROLOGUE, operators_in(built.graph)))


def test_in_inference_so_much_is_under_way_that_the_disk_has_more_when_it_is_done() -> None:
    """Matrices of 16 MiB: with eight of them before it, a fetch fills 128 MiB."""
    built = chain(12, 2048, "inference")
    Prefetch()(built.graph, built.context)
    assert places(built, ops.fetch) == {f"w{i}": max(i - 8, PROLOGUE) for i in range(12)}
    assert places(built, ops.upload) == {f"w{i}": max(i - 2, PROLOGUE) for i in range(12)}
    small = chain(8, kind="inference")
    Prefetch()(small.graph, small.context)
    assert set(places(small, ops.fetch).values()) == {PROLOGUE}
    budgeted = chain(12, 2048, "inference", host_memory="240MiB")  # 192 MiB of gradients live there
    Prefetch()(budgeted.graph, budgeted.context)
    assert peak(budgeted) <= 48 << 20


def test_golden() -> None:
    chain(5).check(
        Prefetch(),
        before="""
        forward graph
        inputs
          w0 : f32[16, 16] on nvme, gradient on host
          w1 : f32[16, 16] on nvme, gradient on host
          w2 : f32[16, 16] on nvme, gradient on host
          w3 : f32[16, 16] on nvme, gradient on host
          w4 : f32[16, 16] on nvme, gradient on host
          %0 : f32[2, 16]
        operator 0
          fetch w0  # lower_gathers
          upload w0  # lower_gathers
          allgather w0  # lower_gathers
          %1 = wait w0 : f32[16, 16]  # lower_gathers
          %2 = aten.mm(%0, %1) : f32[2, 16]
          release w0  # lower_gathers
        operator 1
          fetch w1  # lower_gathers
          upload w1  # lower_gathers
          allgather w1  # lower_gathers
          %3 = wait w1 : f32[16, 16]  # lower_gathers
          %4 = aten.mm(%2, %3) : f32[2, 16]
          release w1  # lower_gathers
        operator 2
          fetch w2  # lower_gathers
          upload w2  # lower_gathers
          allgather w2  # lower_gathers
          %5 = wait w2 : f32[16, 16]  # lower_gathers
          %6 = aten.mm(%4, %5) : f32[2, 16]
          release w2  # lower_gathers
        operator 3
          fetch w3  # lower_gathers
          upload w3  # lower_gathers
          allgather w3  # lower_gathers
          %7 = wait w3 : f32[16, 16]  # lower_gathers
          %8 = aten.mm(%6, %7) : f32[2, 16]
          release w3  # lower_gathers
        operator 4
          fetch w4  # lower_gathers
          upload w4  # lower_gathers
          allgather w4  # lower_gathers
          %9 = wait w4 : f32[16, 16]  # lower_gathers
          %10 = aten.mm(%8, %9) : f32[2, 16]
          release w4  # lower_gathers
        return %10
        """,
        after="""
        forward graph
        inputs
          w0 : f32[16, 16] on nvme, gradient on host
          w1 : f32[16, 16] on nvme, gradient on host
          w2 : f32[16, 16] on nvme, gradient on host
          w3 : f32[16, 16] on nvme, gradient on host
          w4 : f32[16, 16] on nvme, gradient on host
          %0 : f32[2, 16]
        prologue
          fetch w0  # lower_gathers
          upload w0  # lower_gathers
          allgather w0  # lower_gathers
          fetch w1  # lower_gathers
          upload w1  # lower_gathers
          fetch w2  # lower_gathers
        operator 0
          allgather w1  # lower_gathers
          upload w2  # lower_gathers
          fetch w3  # lower_gathers
          %1 = wait w0 : f32[16, 16]  # lower_gathers
          %2 = aten.mm(%0, %1) : f32[2, 16]
          release w0  # lower_gathers
        operator 1
          allgather w2  # lower_gathers
          upload w3  # lower_gathers
          fetch w4  # lower_gathers
          %3 = wait w1 : f32[16, 16]  # lower_gathers
          %4 = aten.mm(%2, %3) : f32[2, 16]
          release w1  # lower_gathers
        operator 2
          allgather w3  # lower_gathers
          upload w4  # lower_gathers
          %5 = wait w2 : f32[16, 16]  # lower_gathers
          %6 = aten.mm(%4, %5) : f32[2, 16]
          release w2  # lower_gathers
        operator 3
          allgather w4  # lower_gathers
          %7 = wait w3 : f32[16, 16]  # lower_gathers
          %8 = aten.mm(%6, %7) : f32[2, 16]
          release w3  # lower_gathers
        operator 4
          %9 = wait w4 : f32[16, 16]  # lower_gathers
          %10 = aten.mm(%8, %9) : f32[2, 16]
          release w4  # lower_gathers
        return %10
        """,
    )


def test_golden_of_backward() -> None:
    built = Builder("backward", {f"w{i}": (4, 4) for i in range(4)})
    dx = built.input(4, 4, name="tangents_1")
    gradients: list[object] = []
    for i in reversed(range(4)):
        gradients.append(built.call(aten.mm.default, dx, dx))
        dx = built.call(aten.mm.default, dx, built.gather(f"w{i}"))
    built.returns(*gradients, dx, gradients={i: f"w{3 - i}" for i in range(4)}, backward=5)
    built.run(ReduceGradients(), SinkGathers(), Regions(), LowerGathers(), OffloadGradients())
    built.check(
        Prefetch(),
        after="""
        backward graph
        inputs
          w0 : f32[4, 4] on nvme, gradient on host
          w1 : f32[4, 4] on nvme, gradient on host
          w2 : f32[4, 4] on nvme, gradient on host
          w3 : f32[4, 4] on nvme, gradient on host
          %0 : f32[4, 4]
        prologue
          fetch w3  # lower_gathers
          upload w3  # lower_gathers
          fetch w2  # lower_gathers
        operator 0
          allgather w3  # lower_gathers
          upload w2  # lower_gathers
          fetch w1  # lower_gathers
          %1 = aten.mm(%0, %0) : f32[4, 4]
          %2 = reduce_scatter w3, %1 : f32[4, 4]  # reduce_gradients
        operator 1
          allgather w2  # lower_gathers
          upload w1  # lower_gathers
          fetch w0  # lower_gathers
          %3 = wait w3 : f32[4, 4]  # lower_gathers
          %4 = aten.mm(%0, %3) : f32[4, 4]
          release w3  # lower_gathers
          %5 = aten.mm(%4, %4) : f32[4, 4]
          %6 = reduce_scatter w2, %5 : f32[4, 4]  # reduce_gradients
        operator 2
          allgather w1  # lower_gathers
          upload w0  # lower_gathers
          offload w3, %2  # offload_gradients
          %7 = wait w2 : f32[4, 4]  # lower_gathers
          %8 = aten.mm(%4, %7) : f32[4, 4]
          release w2  # lower_gathers
          %9 = aten.mm(%8, %8) : f32[4, 4]
          %10 = reduce_scatter w1, %9 : f32[4, 4]  # reduce_gradients
        operator 3
          allgather w0  # lower_gathers
          offload w2, %6  # offload_gradients
          %11 = wait w1 : f32[4, 4]  # lower_gathers
          %12 = aten.mm(%8, %11) : f32[4, 4]
          release w1  # lower_gathers
          %13 = aten.mm(%12, %12) : f32[4, 4]
          %14 = reduce_scatter w0, %13 : f32[4, 4]  # reduce_gradients
        operator 4
          offload w1, %10  # offload_gradients
          %15 = wait w0 : f32[4, 4]  # lower_gathers
          %16 = aten.mm(%12, %15) : f32[4, 4]
          release w0  # lower_gathers
          offload w0, %14  # offload_gradients
        return None, None, None, None, %16
        """,
    )


@pytest.mark.parametrize("count", [1, 2, 4, 12])
@pytest.mark.parametrize("distances", DISTANCES)
def test_distances(count: int, distances: tuple[int, int, int]) -> None:
    built = chain(count)
    built.run(Prefetch(distances))
    for op, distance in zip((ops.allgather, ops.upload, ops.fetch), distances, strict=True):
        assert places(built, op) == {f"w{i}": max(i - distance, PROLOGUE) for i in range(count)}


def test_without_prefetching_each_transfer_starts_in_its_operator() -> None:
    built = chain(3)
    built.knows(successor_prologue=(PrologueTransfer(ops.fetch, 2, 1),))
    built.knows(config=Config(placement="nvme", prefetch=None))
    prefetch = Prefetch(None)
    for op in ops.TRANSFERS:
        prefetch(built.graph, built.context)
        assert places(built, op) == {"w0": 0, "w1": 1, "w2": 2}
    assert not places(built, ops.fetch, for_backward=True) and prefetch.prologue(built.graph, built.context) == ()


def test_in_one_operator_the_nearer_use_comes_first() -> None:
    built = chain(6)
    built.run(Prefetch((1, 2, 3)))
    transfers = [n for n in nodes_calling(built.graph, *ops.TRANSFERS) if operator_of(n) == 0]
    first = [(built.context.tile_of(n).name, n.target) for n in transfers]
    assert first == [("w1", ops.allgather), ("w2", ops.upload), ("w3", ops.fetch)]


# -- for backward -----------------------------------------------------------------------------------------------------


def layers(count: int, **options: object) -> Record:
    """Capture a chain of linear layers, without biases."""
    torch.manual_seed(0)
    stack = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(count)))
    model = Expression(lambda m, x: m.stack(x).relu().sum(), stack=stack)
    return train(model, torch.randn(4, 16), config=Config(placement="infinity-nvme", pack=None, **options))


@pytest.mark.parametrize("count", [1, slow(2), slow(3), 8])
@pytest.mark.parametrize("distances", named(DISTANCES, [(1, 2, 3), (1, 4, 9)]))
def test_the_turn_is_exact(count: int, distances: tuple[int, int, int]) -> None:
    """Forward and backward are one sequence of operators: each transfer stands at its distance ahead of its use."""
    record = layers(count, prefetch=distances)
    (forward, before), (backward, after) = record.planned["forward"], record.planned["backward"]
    length = operators_in(forward.graph)
    use = {after.tile_of(n).name: operator_of(n) for n in nodes_calling(backward.graph, ops.wait)}
    due, started = {}, {}
    for op, distance in zip((ops.allgather, ops.upload, ops.fetch), distances, strict=True):
        due |= {(op, name): max(length + at - distance, 0) for name, at in use.items() if at < distance}
        for_backward = [n for n in nodes_calling(forward.graph, op) if event_of(n).for_backward]
        started |= {(op, before.tile_of(n).name): operator_of(n) for n in for_backward}
    assert started == due
    in_prologue = {
        (n.target, after.tile_of(n).name)
        for n in nodes_calling(backward.graph, *ops.TRANSFERS)
        if operator_of(n) == PROLOGUE
    }
    assert started.keys() == in_prologue


def test_an_inference_graph_has_no_turn() -> None:
    built = chain(3)
    built.run(Prefetch())
    assert not any(places(built, op, for_backward=True) for op in ops.TRANSFERS)


def test_a_graph_without_operators() -> None:
    built = Builder("forward", {"w0": (4, 4)})
    built.returns(built.input(2), built.token("w0"))
    built.knows(successor_prologue=(PrologueTransfer(ops.fetch, 0, 3),))
    built.check(
        SinkGathers(),
        Regions(),
        LowerGathers(),
        Prefetch(),
        after="""
        forward graph
        inputs
          w0 : f32[4, 4] on nvme, gradient on host
          %0 : f32[2]
        return %0, w0
        """,
    )


@pytest.mark.parametrize(("tiles", "start"), [(1, 2), (2, 1), (3, 0)])
def test_the_turn_holds_on_to_a_tile_at_no_cost(tiles: int, start: int) -> None:
    """The last tile of forward is the first of backward: from its own fetch on, it may be held for backward, too."""
    built = chain(3, device_memory=tiles * KIB)
    built.knows(successor_prologue=(PrologueTransfer(ops.fetch, 2, 3),))
    built.run(Prefetch((1, 2, 3)))
    assert places(built, ops.fetch, for_backward=True) == {"w2": start}
    assert peak(built) == tiles * KIB


def test_a_turn_that_never_fits_is_left_out() -> None:
    built = chain(3, device_memory=KIB)
    built.knows(successor_prologue=(PrologueTransfer(ops.fetch, 0, 3), PrologueTransfer(ops.upload, 0, 2)))
    built.run(Prefetch((1, 2, 3)))
    assert not places(built, ops.fetch, for_backward=True) and not places(built, ops.upload, for_backward=True)


# -- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", range(1, 6))
def test_prefetching_shrinks_to_the_budget(tiles: int) -> None:
    """One tile is in use; as many more as there is room for are on their way."""
    built = chain(8, device_memory=tiles * KIB)
    built.run(Prefetch((1, 2, 3)))
    assert peak(built) == min(tiles, 4) * KIB
    # Nothing is in use in the prologue: as many tiles as the budget holds may be fetched there.
    earliest = [PROLOGUE if i < tiles else i - tiles + 1 for i in range(8)]
    for op, distance in zip((ops.allgather, ops.upload, ops.fetch), (1, 2, 3), strict=True):
        assert places(built, op) == {f"w{i}": max(i - distance, earliest[i], PROLOGUE) for i in range(8)}


def test_the_smaller_budget_counts() -> None:
    # The gradients that live in host memory take a block each.
    built = chain(4, device_memory=3 * KIB, host_memory=(4 * 4 + 2) * KIB)
    built.run(Prefetch())
    assert peak(built) == 2 * KIB


def test_a_large_tile_waits_and_the_small_ones_behind_it_too() -> None:
    built = Builder("forward", {"a": (16, 16), "big": (16, 64), "c": (64, 16), "d": (16, 16)}, device_memory=8 * KIB)
    x = built.input(2, 16)
    for name in ("a", "big", "c", "d"):
        x = built.call(aten.mm.default, x, built.gather(name))
    built.returns(x)
    built.run(SinkGathers(), Regions(), LowerGathers(), Prefetch((1, 2, 3)))
    # `big` and `c` fill the budget together.
    assert places(built, ops.fetch) == {"a": PROLOGUE, "big": PROLOGUE, "c": 1, "d": 2}
    assert peak(built) == 8 * KIB


def test_a_budget_below_one_tile_names_the_tiles() -> None:
    built = chain(3, device_memory=KIB - 1)
    with pytest.raises(PlanError, match=r"needs 1KiB .* operator 0, and the budget is 1023B: raise .*'w0' \(1KiB\)"):
        built.run(Prefetch())


def test_the_error_names_gradients_too() -> None:
    with pytest.raises(Exception, match=r"backward .* needs 3KiB.*gradient of 'stack.1.weight' \(1KiB\)"):
        layers(2, device_memory=2 * KIB, tile=None)


@pytest.mark.parametrize("tiles", [*map(slow, range(3, 8)), 8])
def test_the_whole_step_stays_within_the_budget(tiles: int) -> None:
    """Forward with what it starts for backward, and backward with gradients that wait; checked by the specification as
    well."""
    model = Expression(
        lambda m, x: m.stack(x).relu().sum(), stack=nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    )
    config = Config(placement="infinity-nvme", residency=False)
    kept = train(copy.deepcopy(model), torch.randn(4, 16), config=config).planned["forward"][1].kept
    config = replace(config, device_memory=kept + tiles * KIB)
    record = assert_trains_like_eager(model, torch.randn(4, 16), config=config)
    for kind in ("forward", "backward"):
        graph, context = record.planned[kind][0].graph, record.planned[kind][1]
        ledger = Ledger(spans(graph, context), operators_in(graph), tiles * KIB)
        assert ledger.over_budget() is None, kind
    forward = record.planned["forward"][0].graph
    for_backward = [n for n in nodes_calling(forward, ops.fetch) if event_of(n).for_backward]
    assert len(for_backward) == 2  # what backward needs in its prologue: it begins with an operator that uses no tile


def test_offloads_wait_only_where_there_is_room() -> None:
    kept = layers(6).planned["forward"][1].kept

    def offloads(budget: int | None) -> list[int]:
        options = {} if budget is None else {"device_memory": kept + budget}
        graph = layers(6, **options).planned["backward"][0].graph
        made = {n.args[0]: operator_of(n) for n in nodes_calling(graph, ops.reduce_scatter)}
        return [operator_of(n) - made[n.args[0]] for n in nodes_calling(graph, ops.offload)]

    assert offloads(None) == [2, 2, 2, 1, 0, 0]  # the last operator makes two
    assert offloads(3 * KIB) == [0] * 6
    assert 0 < sum(offloads(5 * KIB)) < 7


def test_states_and_activations_that_live_on_the_device_count() -> None:
    record_of = lambda **options: train(  # noqa: E731
        Expression(lambda m, x: m.layer(x).relu().sum(), layer=nn.Linear(16, 16)),
        torch.randn(4, 16),
        config=Config(placement="device", **options),
    )
    _, context = record_of().planned["forward"]
    states = 4 * 2 * 4096  # the weight, the bias, their gradients and Adam's moments, in blocks
    assert (context.living_on_device.total, context.kept) == (states, 4 * 16 * 4)
    assert record_of(device_memory=states + context.kept).planned.keys() == {"forward", "backward"}
    with pytest.raises(Exception, match=r"with a budget exceeds that by 1B(.|\n)*activations kept.*256 B") as refused:
        record_of(device_memory=states + context.kept - 1)
    assert "placement of parameters on host or nvme: 8.0 KiB less" in str(refused.value)
