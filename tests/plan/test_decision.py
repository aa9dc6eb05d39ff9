"""`placement="auto"` decides for described machines: a simulated step overrules the rule, or does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import zinf_fx
from zinf_fx.config import Config, Placement
from zinf_fx.errors import BudgetError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.placement import PlannedDevice
from zinf_fx.plan.hardware import Hardware, Link, load
from zinf_fx.plan.memory.layout import for_own_memory
from zinf_fx.plan.memory.use import peak_device_bytes, peak_host_bytes, staying_on_device
from zinf_fx.plan.placement.decision import PARAMETERS_AT_MOST, STATES, Decision, decide, needed_by
from zinf_fx.plan.placement.placing import Rooms, Sizes
from zinf_fx.plan.plan import Plan

HIDDEN, LAYERS = 128, 12
MODEL_BYTES = LAYERS * HIDDEN * HIDDEN * 4
SIZES = Sizes(MODEL_BYTES, MODEL_BYTES, 3 * MODEL_BYTES)


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.empty(batch, HIDDEN, device="meta"),)


def model() -> nn.Module:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Tanh()) for _ in range(LAYERS)]
        return nn.Sequential(*layers)


def machine(device: int, host: int = 1 << 40, **others: object) -> Hardware:
    """Describe a GPU with memory for so many bytes of states, and host memory likewise."""
    hardware = load("rtx-4090")
    memories = {"device": replace(hardware.device, capacity=device * 5 // 4)}
    memories["host"] = replace(hardware.host, capacity=host * 5 // 4)
    return replace(hardware, **{**memories, **others})


def slow(hardware: Hardware, **factors: float) -> Hardware:
    """Return the machine with memories and links that are so many times slower."""
    changed = {}
    for name, factor in factors.items():
        component = getattr(hardware, name)
        if isinstance(component, Link):
            changed[name] = replace(component, bandwidth=component.bandwidth / factor)
        else:
            changed[name] = replace(component, read=component.read / factor, write=component.write / factor)
    return replace(hardware, **changed)


def as_options(placement: Placement) -> dict[str, str]:
    return {name: getattr(placement, name) for name in STATES}


@cache
def plans(batch: int, placement: Placement, device: PlannedDevice = "cpu") -> Sequence[Plan]:
    options = {"placement": as_options(placement), "prefetch": None, "pack": None}
    return plan_model(model(), inputs(batch), device=device, **options).plans


def decision(hardware: Hardware, batch: int = 32, parameters: int = LAYERS, **options: object) -> Decision:
    return decide(lambda config: plans(batch, config), SIZES, Config(**options), hardware, 1, parameters)


def test_where_everything_fits_nothing_leaves_and_nothing_is_simulated():
    decided = decision(machine(device=40 * MODEL_BYTES))
    assert decided.placement == Placement() and decided.nothing_moves
    assert [candidate.seconds for candidate in decided.candidates] == [None]
    assert decided.reason == "everything fits on the device, so nothing leaves it"


def of_parameters_and_activations_one_leaves() -> Hardware:
    """Describe a machine on which, without the optimizer's states and gradients, parameters of `MODEL_BYTES` or the
    smaller activations are too many."""
    return machine(device=MODEL_BYTES + 4096)


def test_of_parameters_and_activations_the_one_leaves_that_gives_the_faster_step():
    """Section 7.1: "we empirically chose to offload the one that gives better performance"."""
    hardware = of_parameters_and_activations_one_leaves()
    decided = decision(hardware)
    assert decided.rule.parameters == "host" and decided.rule.activations == "device"
    assert decided.placement == replace(decided.rule, parameters="device", activations="host")
    by_placement = {candidate.placement: candidate.seconds for candidate in decided.candidates}
    assert by_placement[decided.placement] == min(by_placement.values()) < 0.99 * by_placement[decided.rule]
    assert "less than with the choice of section 7.1's rule" in decided.reason


def test_a_machine_with_slow_host_memory_keeps_the_optimizer_on_the_device():
    room = 4 * MODEL_BYTES  # for the optimizer's states alone, or for everything else
    fast = decision(machine(device=room))
    assert fast.rule == fast.placement == Placement(optimizer="host")
    # Only host memory itself is slow, where the CPU would update the states.
    decided = decision(slow(machine(device=room), host=100))
    assert decided.rule == Placement(optimizer="host")
    assert decided.placement.optimizer == "device" and "host" in as_options(decided.placement).values()


def test_the_rule_wins_ties():
    """A device that computes so slowly that every transfer is hidden."""
    hardware = of_parameters_and_activations_one_leaves()
    hardware = replace(hardware, peak=dict.fromkeys(hardware.peak, 1e8))
    decided = decision(hardware)
    assert decided.placement == decided.rule
    others = [candidate.seconds for candidate in decided.candidates if candidate.placement != decided.rule]
    mine = next(candidate.seconds for candidate in decided.candidates if candidate.placement == decided.rule)
    assert min(others) < mine and min(others) > 0.99 * mine
    assert decided.reason == "section 7.1's rule; of 2 near its choice that fit, none is simulated to be over 1% faster"


def test_a_choice_that_cannot_be_planned_is_listed_and_the_rule_goes_on():
    hardware, choice = machine(device=4 * MODEL_BYTES), Placement(optimizer="host")

    def plans_with(placement: Placement) -> Sequence[Plan]:
        if placement == choice:
            raise BudgetError("the forward graph needs too much\nand a table says what")
        return plans(32, placement)

    decided = decide(plans_with, SIZES, Config(device_memory="1GiB"), hardware, 1, LAYERS)
    first, second, *_ = decided.candidates
    assert (first.placement, first.refused) == (choice, "the forward graph needs too much")
    assert second.placement == decided.rule == Placement(gradients="host", optimizer="host")
    text = str(decided)
    assert "doesn't fit" in text and "optimizer on host, activations on device: the forward graph needs" in text


def test_what_is_in_flight_counts():
    """The first choice would fit by its size, but not together with what else a step has on the device."""
    hardware = of_parameters_and_activations_one_leaves()
    decided = decision(hardware, batch=512)
    first, second = decided.candidates
    assert first.placement == replace(second.placement, parameters="device") and first.seconds is None
    assert first.refused == "it needs 1.6 MiB of device memory with what is in flight, which has 965.0 KiB"
    assert (
        second.placement == decided.placement == decided.rule
        and second.device < hardware.device.capacity < first.device
    )
    assert decided.reason == "section 7.1's rule; nothing near it fits"


def test_nothing_fits_with_what_is_in_flight_and_the_error_lists_what_was_tried():
    with pytest.raises(BudgetError) as raised:
        decision(machine(device=MODEL_BYTES + 4096, host=3 * MODEL_BYTES))
    first, *tried = str(raised.value).splitlines()
    assert first == "placement 'auto' finds none that fits: without any state, host memory is too small"
    assert tried[:2] == [
        "Tried:",
        "  parameters on nvme, gradients on nvme, optimizer on host, activations on device: it needs 3.8 MiB of host "
        "memory with what is in flight, which has 2.8 MiB",
    ]
    assert tried[-1].startswith("  parameters on nvme, gradients on nvme, optimizer on nvme, activations on device: it")


def test_of_a_large_model_only_the_rules_choice_is_planned_and_the_reason_says_so():
    decided = decision(of_parameters_and_activations_one_leaves(), parameters=PARAMETERS_AT_MOST + 1)
    assert decided.placement == decided.rule and [candidate.seconds for candidate in decided.candidates] == [None]
    assert decided.reason == (
        "section 7.1's rule alone: it has 501 parameter tensors, and a model of over 500 is planned once"
    )


def test_what_cannot_be_simulated_is_placed_by_the_rule_alone():
    hardware = of_parameters_and_activations_one_leaves()
    decided = decision(replace(hardware, peak={"float16": 1e12}))
    assert decided.placement == decided.rule
    assert decided.reason.startswith("section 7.1's rule alone: no step can be simulated, because RTX 4090")
    assert "has no peak for float32" in decided.reason


def test_export_plan_decides_for_the_hardware():
    hardware = of_parameters_and_activations_one_leaves()
    plan = zinf_fx.export_plan(model(), inputs(32), hardware=hardware, prefetch=None, pack=None)
    placement = plan.config.placement
    assert placement == decision(hardware).placement != Placement()
    assert [plan] == plans(32, placement, "cuda")
    assert zinf_fx.export_plan(model(), inputs(32)).config.placement == Placement()  # this machine has room


def test_ranks_have_their_parts():
    """What one rank has no room for, four have."""
    hardware = machine(device=4 * MODEL_BYTES)
    alone = plan_model(model(), inputs(8), hardware=hardware).decision
    four = plan_model(model(), inputs(8), world_size=4, hardware=replace(hardware, ranks_per_node=4)).decision
    assert not alone.nothing_moves and four.nothing_moves


def test_inference_has_nothing_but_parameters_to_place():
    frozen = model().requires_grad_(False)
    with torch.no_grad():
        hardware = machine(device=MODEL_BYTES // 2)
        decided = plan_model(frozen, inputs(8), hardware=hardware, prefetch=None, pack=None).decision
    assert decided.placement == Placement(parameters="host")


def test_a_policy_that_moves_activations_is_left_to_do_so():
    decided = decision(of_parameters_and_activations_one_leaves(), activations="offload")
    assert decided.placement.activations == "device"


@pytest.mark.parametrize("host", [1 << 40, 0], ids=["own-memory", "unified"])
@pytest.mark.parametrize("own_memory", [True, False])
def test_what_a_plan_needs_is_what_it_sets_apart(own_memory: bool, host: int):
    """Gradients and activations on their way to NVMe, and gaps between buffers, need memory, too."""
    (plan,) = plans(32, Placement("nvme", "nvme", "nvme", "nvme"))
    graphs = tuple(replace(graph, has_own_memory=own_memory) for graph in plan.graphs)
    plan = replace(plan, graphs=graphs, regions=replace(plan.regions, device=own_memory * MODEL_BYTES))
    needed = needed_by(plan, Rooms(1 << 40, host, 1 << 40))
    if host and not own_memory:
        assert needed["host"] <= peak_host_bytes(plan)  # which has the tiles in use, until their release
        plan = for_own_memory(plan)
        assert needed["device"] > staying_on_device(plan)  # by the tiles in use
    expected = {"device": peak_device_bytes(plan), "host": peak_host_bytes(plan)}
    if not host:
        expected = {"device": sum(expected.values()), "host": 0}
    elif not own_memory:
        del expected["device"]
    assert {tier: needed[tier] for tier in expected} == expected
