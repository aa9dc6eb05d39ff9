"""Figures of simulated plans, on a machine of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError, PlanError
from zinf_fx.plan.hardware import Disks, Hardware, Link, Memory
from zinf_fx.plan.plan import Fingerprint, Plan
from zinf_fx.plan.schedule import Event, GraphSchedule, Operator, Tile
from zinf_fx.plan.simulation.batch import batch_of, with_batch
from zinf_fx.plan.simulation.operator_time import decided_by_launches, seconds_of_operator
from zinf_fx.plan.simulation.simulate import simulate_plan

MACHINE = Hardware(
    name="round",
    nodes=1,
    ranks_per_node=1,
    achievable=0.5,
    peak={"float32": 2000.0},
    device=Memory(10**9, 100.0, 100.0),
    host=Memory(10**9, 100.0, 100.0),
    nvme=Disks(10**12, 8192.0, 4096.0, None),
    upload=Link(1e12, 1e-12),
    download=Link(1e12, 1e-12),
    in_node=Link(1e12, 1e-12),
    between_nodes=Link(1e12, 1e-12),
)


@pytest.mark.parametrize(
    ("operator", "seconds"),
    [
        (Operator(0, "mm", 1, flops=3000, product_bytes=100, dtype=torch.float32), 3.0),  # of its arithmetic
        (Operator(0, "mm", 1, flops=1000, product_bytes=700, dtype=torch.float32), 7.0),  # of its bytes
        (Operator(0, "relu", 1, other_bytes=200), 2.0),
        (Operator(0, "mm, relu", 2, flops=3000, product_bytes=100, other_bytes=200, dtype=torch.float32), 5.0),
    ],
)
def test_an_operator_takes_the_longer_of_arithmetic_and_bytes(operator: Operator, seconds: float):
    assert seconds_of_operator(operator, MACHINE) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kernels", "seconds"),
    [(0, 5.0), (9, 5.0), (11, 5.5)],
)
def test_an_operator_takes_as_long_as_its_launches_at_least(kernels: int, seconds: float):
    operator = Operator(0, "mm, relu", 2, 3000, 100, 200, torch.float32, kernels)
    assert seconds_of_operator(operator, replace(MACHINE, launch=0.5)) == pytest.approx(seconds)
    assert seconds_of_operator(operator, MACHINE) == pytest.approx(5.0)


def test_operators_that_launches_decide_are_counted():
    """Of two operators, kernels take 3 and 1 s; each has four."""
    of_two = plan()
    (graph,) = of_two.graphs
    of_two = replace(of_two, graphs=(replace(graph, operators=tuple(replace(o, kernels=4) for o in graph.operators)),))
    counts = {launch: decided_by_launches(of_two, replace(MACHINE, launch=launch)) for launch in (0.0, 0.25, 0.5, 1.0)}
    assert counts == {0.0: 0, 0.25: 0, 0.5: 1, 1.0: 2}


def test_a_dtype_without_a_peak_is_refused():
    with pytest.raises(ConfigError, match="no peak for float64"):
        seconds_of_operator(Operator(0, "mm", 1, flops=1, dtype=torch.float64), MACHINE)


def plan(lines: tuple[str, ...] = ("input 0: parameter 'w' f32[64, 64] on nvme", "input 1: f32[4, 64]")) -> Plan:
    """One operator, which waits for a fetch of 16 KiB: 2 s; it computes 3 s; the next one 1 s."""
    tile = Tile("w", (64, 64), torch.float32, "nvme", None)
    events = [Event(kind, 0, 0) for kind in ("fetch", "upload", "allgather", "wait", "release")]
    operators = (
        Operator(0, "mm", 1, flops=3000, product_bytes=1, dtype=torch.float32),
        Operator(1, "relu", 1, other_bytes=100),
    )
    graph = GraphSchedule("inference", (tile,), operators, tuple(events))
    fingerprint = Fingerprint("", "", lines, tuple(range(len(lines))))
    return Plan((graph,), Config(placement="nvme"), kept=10, fingerprint=fingerprint)


def test_time_rate_utilisation_and_stalls():
    result = simulate_plan(plan(), MACHINE)
    assert result.seconds == pytest.approx(6)
    assert result.flops == 3000 and result.flops_per_second == pytest.approx(500)
    assert result.utilisation["compute"] == pytest.approx(4 / 6) and result.utilisation["disk"] == pytest.approx(2 / 6)
    assert result.critical_seconds["disk"] == pytest.approx(2) and result.critical_seconds["compute"] == pytest.approx(
        4
    )
    assert result.stalled["disk"] == pytest.approx(2) and result.stalled["link"] == 0
    assert [stall.before for stall in result.stalls()] == ["inference 0"]


def test_another_batch_computes_more_and_moves_the_same_parameters():
    assert batch_of(plan()) == 4
    twice = with_batch(plan(), 8)
    simulation = simulate_plan(twice, MACHINE)
    assert simulation.seconds == pytest.approx(2 + 6 + 2) and twice.kept == 20
    assert twice.graphs[0].tiles == plan().graphs[0].tiles
    activation = replace(plan().graphs[0].tiles[0], shape=(64,), activation=True)
    graph = replace(plan().graphs[0], tiles=(activation,))
    assert with_batch(replace(plan(), graphs=(graph,)), 2).graphs[0].tiles[0].shape == (32,)


def test_another_batch_leaves_each_tensor_parallel_rank_its_part_of_activations():
    whole = plan().graphs[0].tiles[0]
    part = replace(whole, shape=(64,), activation=True, ranks=2, shard=32, partitioned=True)
    of_twice = with_batch(replace(plan(), graphs=(replace(plan().graphs[0], tiles=(part,)),)), 8).graphs[0].tiles[0]
    assert (of_twice.nbytes, of_twice.held_nbytes) == (2 * part.nbytes, 2 * part.held_nbytes)


def test_the_batch_is_that_of_what_the_call_brings():
    """Neither a buffer decides, nor a gradient that backward begins with."""
    lines = ("input 0: buffer f32[64]", "input 1: f32[4, 64]", "input 2: size s1", "input 3: internal f32[256, 64]")
    assert batch_of(plan(lines)) == 4


@pytest.mark.parametrize(
    "lines", [(), ("input 0: f32[4]", "input 1: f32[5]"), ("input 0: size s1",), (f"input 0: f32[{'9' * 5000}]",)]
)
def test_a_batch_that_is_not_known_is_refused(lines: tuple[str, ...]):
    with pytest.raises(PlanError, match="the batch of the plan's inputs is not known"):
        batch_of(plan(lines))
