"""Charts of a plan's memory show it per operator, and as a golden text for a few and for many operators."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from gate import slow
from torch import nn

from zinf_fx import Config
from zinf_fx.frontend.explain import explain, plan_model
from zinf_fx.plan.memory.accounting import flows
from zinf_fx.plan.memory.use import arena_by_operator, host_arena
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE, Event, GraphSchedule, Operator, Tile
from zinf_fx.plan.show.curve import ASCII, BLOCKS
from zinf_fx.plan.show.json import to_json
from zinf_fx.plan.show.memory_curve import host_arena_curve, in_flight, render_curves

MIB = 1 << 20


def chain(layers: int, width: int = 512) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Build a matrix product per operator, every fourth of them larger."""
    widths = [width * (4 if i % 4 == 3 else 1) for i in range(layers + 1)]
    with torch.device("meta"):
        linears = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
        return nn.Sequential(*linears), (torch.zeros(2, width),)


def plan_of(layers: int, **options: object) -> Plan:
    model, inputs = chain(layers)
    (plan,) = plan_model(model, inputs, **options).plans
    return plan


def rendered(plan: Plan, width: int = 100) -> str:
    return "\n\n".join(chart for graph in plan.graphs for chart in render_curves(plan, graph, ASCII, width)) + "\n"


def test_golden_of_a_few_operators(golden):
    plan = plan_of(4, placement="infinity-nvme", device_memory="14MiB", host_memory="48MiB")
    golden("memory_curve_4_operators.txt", rendered(plan))


def test_golden_of_many_operators(golden):
    plan = plan_of(100, placement="nvme", device_memory="24MiB")
    assert len(plan.graphs[0].operators) == 100
    golden("memory_curve_100_operators.txt", rendered(plan))


def test_what_the_arena_holds_from_event_to_event():
    """Tile 0 is released in operator 0 and still there while it computes; the gradient of tile 1 stays."""
    tiles = (
        Tile("a", (256, 1024), torch.float32, "nvme", None),
        Tile("b", (512, 1024), torch.float32, "nvme", "host", state_tier="nvme"),
    )
    events = (
        *(Event(kind, 0, PROLOGUE) for kind in ("fetch", "upload", "allgather")),
        *(Event(kind, 1, 0) for kind in ("fetch", "upload", "allgather")),
        Event("wait", 0, 0),
        Event("release", 0, 0),
        Event("wait", 1, 2),
        Event("release", 1, 2),
        Event("reduce_scatter", 1, 2),
        Event("offload", 1, 3),
    )
    graph = GraphSchedule("inference", tiles, tuple(Operator(i, "mm", 1) for i in range(5)), events)
    plan = Plan((graph,), Config(placement={"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}))
    assert arena_by_operator(plan, graph) == [MIB, 3 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB]


@pytest.mark.parametrize(
    ("placement", "prefetch"),
    [
        slow("nvme", None),
        ("nvme", (1, 2, 3)),
        slow("infinity-nvme", (1, 2, 3)),
        ("infinity-cpu", None),
        slow("zero-offload", None),
    ],
)
def test_the_curves_have_the_peaks_of_the_tables(placement: str, prefetch: tuple[int, ...] | None):
    plan = plan_of(9, placement=placement, prefetch=prefetch)
    uses = {use.phase: use.total for use in host_arena(plan)}
    for graph in plan.graphs:
        of_graph = flows(plan, graph)
        assert host_arena_curve(plan, graph).peak == uses[graph.kind]
        curve = in_flight(plan, graph)
        assert curve.peak == max(flow.device + flow.host for flow in of_graph)
        assert [PROLOGUE, *range(len(graph.operators))] == [flow.operator for flow in of_graph]


@pytest.mark.parametrize("budget", ["16MiB", "24MiB"])
def test_a_plan_stays_below_the_lines(budget: str):
    plan = plan_of(12, placement="nvme", device_memory=budget, host_memory="64MiB")
    for graph in plan.graphs:
        for curve in (in_flight(plan, graph), host_arena_curve(plan, graph)):
            assert 0 < curve.peak <= curve.budget
        assert in_flight(plan, graph).budget_in_sight


def test_a_budget_out_of_sight_is_in_the_title():
    plan = plan_of(4, placement="nvme", device_memory="8GiB", host_memory="32MiB")
    device, host = render_curves(plan, plan.graphs[0], ASCII, 100)
    assert device.splitlines()[0].endswith("; budget 8.0 GiB")
    assert "budget" not in host.splitlines()[0] and "budget 32.0 MiB" in host


def test_memory_that_holds_nothing_has_no_chart():
    plan = plan_of(3, placement="device")
    assert not any(render_curves(plan, graph, ASCII, 100) for graph in plan.graphs)
    (chart,) = render_curves(plan := plan_of(3, placement="host"), plan.graphs[0], ASCII, 100)[1:]
    assert chart.startswith("forward, host arena by operator: at most")


def test_other_glyphs_change_the_picture_and_nothing_else():
    plan = plan_of(6, placement="nvme")
    for graph in plan.graphs:
        for ascii, blocks in zip(
            render_curves(plan, graph, ASCII, 120), render_curves(plan, graph, BLOCKS, 120), strict=True
        ):
            assert ascii.isascii() and "█" in blocks
            assert ascii.splitlines()[-1] == blocks.splitlines()[-1]
            assert list(map(len, ascii.splitlines())) == list(map(len, blocks.splitlines()))


def test_explain_shows_them_after_each_table():
    model, inputs = chain(4)
    text = explain(model, *inputs, placement="nvme")
    places = [
        text.index(part) for part in ("FORWARD:", "forward, device", "forward, host", "BACKWARD:", "backward, dev")
    ]
    assert places == sorted(places) and text.isascii()


def test_json_has_them_per_operator():
    plan = plan_of(4, placement="infinity-nvme")
    (data,) = json.loads(to_json([plan]))
    for described, graph in zip(data["graphs"], plan.graphs, strict=True):
        assert [(m["operator"], m["fetched"], m["device"], m["host"]) for m in described["memory"]] == [
            (flow.operator, flow.fetched, flow.device, flow.host) for flow in flows(plan, graph)
        ]
        assert [m["arena"] for m in described["memory"]] == arena_by_operator(plan, graph)
