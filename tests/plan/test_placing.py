"""ZeRO-Infinity's rule (section 7.1) says by sizes alone what leaves first, where to, and what is near its choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zinf_fx.config import Config
from zinf_fx.errors import BudgetError
from zinf_fx.placement import Placement
from zinf_fx.plan.hardware import load
from zinf_fx.plan.placement.placing import (
    SHARE,
    SHARE_WITHOUT_ACTIVATIONS,
    Rooms,
    Sizes,
    by_rule,
    bytes_by_tier,
    placements_near,
    tier_of,
)

# As for bf16 parameters with fp32 Adam (ZeRO, section 3.1), and activations between them.
SIZES = Sizes(parameters=2, gradients=2, optimizer=12, activations=5)


@pytest.mark.parametrize(
    ("device", "host", "nvme", "expected"),
    [
        (21, 99, 99, ("device", "device", "device", "device")),  # "only ... when the memory is not sufficient"
        (20, 99, 99, ("device", "device", "host", "device")),  # the optimizer's states alone are enough
        (9, 99, 99, ("device", "device", "host", "device")),
        (8, 99, 99, ("device", "host", "host", "device")),
        (7, 99, 99, ("device", "host", "host", "device")),
        (6, 99, 99, ("host", "host", "host", "device")),  # of parameters and activations, one is enough
        (5, 99, 99, ("host", "host", "host", "device")),
        (4, 99, 99, ("device", "host", "host", "host")),  # only the other one is
        (1, 99, 99, ("host", "host", "host", "host")),  # both
        (1, 19, 99, ("nvme", "host", "host", "host")),  # both: activations get the faster memory
        (1, 18, 99, ("host", "host", "host", "nvme")),
        (9, 11, 99, ("device", "device", "nvme", "device")),  # "to the fastest memory with enough capacity"
        (8, 11, 99, ("device", "host", "nvme", "device")),
        (8, 0, 99, ("device", "nvme", "nvme", "device")),
        (0, 0, 21, ("nvme", "nvme", "nvme", "nvme")),
    ],
)
def test_what_leaves_and_where_to(device: int, host: int, nvme: int, expected: tuple[str, ...]):
    parameters, gradients, optimizer, activations = expected
    assert by_rule(SIZES, Rooms(device, host, nvme)) == Placement(parameters, gradients, optimizer, activations)


def test_activations_that_are_not_known_stay():
    unknown = replace(SIZES, activations=None)
    assert by_rule(unknown, Rooms(0, 99, 99)) == Placement("host", "host", "host", "device")


def test_a_state_without_bytes_has_no_reason_to_leave():
    frozen = Sizes(parameters=2, gradients=0, optimizer=0, activations=0)
    assert by_rule(frozen, Rooms(1, 99, 99)) == Placement(parameters="host")


# As for adapters beside a frozen base.
ADAPTERS = Sizes(parameters=2, gradients=2, optimizer=12, activations=5, frozen=100)


@pytest.mark.parametrize(
    ("device", "host", "nvme", "expected"),
    [
        (121, 99, 99, ("device", "device", "device", "device", "device")),
        (120, 100, 999, ("device", "device", "device", "device", "host")),
        (21, 99, 999, ("device", "device", "device", "device", "nvme")),
        (20, 105, 999, ("device", "device", "device", "host", "host")),
        (16, 104, 999, ("device", "device", "device", "host", "nvme")),
        (15, 119, 999, ("device", "host", "host", "host", "host")),
        (1, 21, 999, ("host", "host", "host", "host", "nvme")),
    ],
)
def test_what_trains_stays_beside_a_frozen_base(device: int, host: int, nvme: int, expected: tuple[str, ...]):
    placement = by_rule(ADAPTERS, Rooms(device, host, nvme))
    states = ("parameters", "gradients", "optimizer", "activations", "frozen")
    assert tuple(tier_of(state, placement) for state in states) == expected
    assert sum(bytes_by_tier(placement, ADAPTERS).values()) == 121
    assert isinstance(placement, Placement) == (expected[0] == expected[-1])


def test_nothing_fits_and_the_error_says_what_was_needed_and_what_there_is():
    sizes = Sizes(2 << 30, 2 << 30, 12 << 30, 5 << 30)
    with pytest.raises(BudgetError) as raised:
        by_rule(sizes, Rooms(device=1 << 30, host=0, nvme=20 << 30))
    assert str(raised.value).startswith(
        "placement 'auto' finds no memory with room for every state: a rank has 2.0 GiB of parameters, 2.0 GiB of "
        "gradients, 12.0 GiB of optimizer, 5.0 GiB of activations, and room for 1.0 GiB on the device, 20.0 GiB on NVMe"
    )


def test_near_the_choice_is_what_fits_and_could_not_live_in_faster_memory():
    rooms = Rooms(device=6, host=99, nvme=99)
    chosen = by_rule(SIZES, rooms)
    assert list(placements_near(chosen, SIZES, rooms)) == [
        # Parameters and gradients return where activations leave.
        Placement("device", "device", "host", "host"),
    ]
    rooms = Rooms(device=13, host=12, nvme=99)
    assert by_rule(SIZES, rooms) == Placement("device", "device", "host", "device")
    assert list(placements_near(by_rule(SIZES, rooms), SIZES, rooms)) == [Placement("host", "host", "device", "host")]


def test_rooms_are_a_ranks_share_of_a_node_within_the_budgets():
    node = load("dgx-2")
    whole, per_rank = node.host.capacity, node.host.capacity // 16
    assert Rooms.of(node, Config(), 1, 0).host == int(whole * SHARE)
    assert Rooms.of(node, Config(), 16, 0).host == Rooms.of(node, Config(), 64, 0).host == int(per_rank * SHARE)
    assert Rooms.of(node, Config(), 16, 0).nvme == node.nvme.capacity // 16
    assert Rooms.of(node, Config(), 16, 0).device == int((32 << 30) * SHARE)
    assert Rooms.of(node, Config(), 16, None).device == int((32 << 30) * SHARE_WITHOUT_ACTIVATIONS)
    limited = Rooms.of(node, Config(device_memory="1GiB", host_memory="2GiB"), 16, 0)
    assert (limited.device, limited.host) == (1 << 30, 2 << 30)
    # Where the device computes in host memory, both budgets are of that.
    one_memory = replace(node, unified=True)
    assert Rooms.of(one_memory, Config(), 16, 0) == Rooms(
        int(((32 << 30) + per_rank) * SHARE), 0, node.nvme.capacity // 16
    )
    assert Rooms.of(one_memory, Config(host_memory="2GiB"), 1, 0) == Rooms(2 << 30, 0, node.nvme.capacity)
