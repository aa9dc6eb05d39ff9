"""What events mean: live ranges, and which of them leave a tile's memory free."""

from __future__ import annotations

from unittest import mock

import torch

from zinf_fx import Config
from zinf_fx.plan.lifetimes import STEPS, Lifetimes, LiveRange
from zinf_fx.plan.memory.accounting import flows
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Event, GraphKind, GraphSchedule, Operator, Tile

KIB = 1024


def graph(kind: GraphKind, events: list[Event], operators: int) -> GraphSchedule:
    tile = Tile("a", (4, 256), torch.float32, "nvme", "nvme", state_tier="nvme")
    return GraphSchedule(kind, (tile,), tuple(Operator(n, "", 1) for n in range(operators)), tuple(events))


def live_range(*operators: int) -> list[Event]:
    """Return a live range of the tile; `operators`: of its fetch, upload, all-gather, wait and release."""
    return [Event(kind, 0, operator) for kind, operator in zip(STEPS, operators, strict=True)]


def test_a_stay_is_compared_with_those_alone_that_the_turn_begins():
    """A weight that is used in many operators has a live range in each, under a budget."""
    count = 200
    events = [event for operator in range(count) for event in live_range(*[operator] * 5)]
    for_backward = [Event("fetch", 0, count - 1, for_backward=True)]
    lifetimes = Lifetimes([graph("forward", [*events, *for_backward], count), graph("backward", events, count)])
    begin, asked = LiveRange.begin, []
    with mock.patch.object(LiveRange, "begin", property(lambda stay: asked.append(stay) or begin.fget(stay))):
        free = [lifetimes.frees(stay) for stay in lifetimes.of_tile[0]]
    assert all(free) and len(asked) < 3 * len(free)


def test_a_tile_that_two_stays_read_is_in_host_memory_once():
    """Forward reads it for backward, and then for itself."""
    forward = [Event("fetch", 0, 0, for_backward=True), *live_range(1, 2, 2, 2, 2)]
    step = (graph("forward", forward, 4), graph("backward", live_range(0, 0, 0, 0, 0), 1))
    moved = flows(Plan(step, Config(placement="nvme")), step[0])
    assert [(flow.host // KIB, flow.device // KIB) for flow in moved[:4]] == [(0, 0), (4, 0), (4, 0), (0, 4)]
