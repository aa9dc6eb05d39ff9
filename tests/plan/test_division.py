"""`micro_batches="auto"` takes, for described machines, as few micro-batches as fit and take about the least time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from zinf_fx.errors import BudgetError, ConfigError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.hardware import Hardware, load
from zinf_fx.plan.placement.division import Division, OperatorGroup, counts_for, decide_division
from zinf_fx.plan.plan import Plan

HIDDEN, LAYERS, BATCH = 64, 4, 8
BOTH: tuple[OperatorGroup, ...] = (1, "auto")
OPTIONS = {1: (1,), 2: BOTH, 8: BOTH}


class Model(nn.Sequential):
    """Its values are many times as large as its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@cache
def plan_with(count: int, group: OperatorGroup) -> Plan:
    with torch.device("meta"):
        model = Model(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(LAYERS)))
        x = torch.empty(BATCH, 1000, HIDDEN)
    options = {"micro_batches": count, "micro_batch_group": group, "activations": 1}
    (plan,) = plan_model(model, (x,), placement="nvme", **options).plans
    return plan


def machine(device: int = 1 << 40, **others: object) -> Hardware:
    hardware = load("rtx-4090")
    return replace(hardware, device=replace(hardware.device, capacity=device), **others)


def decision(hardware: Hardware, plans: Callable[[int, OperatorGroup], Plan] = plan_with) -> Division:
    return decide_division(plans, OPTIONS, hardware, 1)


@pytest.mark.parametrize(
    ("batch", "counts"), [(1, [1]), (7, [1, 7]), (8, [1, 2, 4, 8]), (60, [1, 2, 4, 10, 20, 60]), (2**20, 21)]
)
def test_counts_divide_the_batch_and_double_at_least(batch: int, counts: list[int] | int) -> None:
    allowed = counts_for(batch)
    assert (allowed if isinstance(counts, list) else len(allowed)) == counts
    assert all(batch % count == 0 for count in allowed) and all(
        2 * count <= other for count, other in pairwise(allowed)
    )


def test_where_the_whole_batch_fits_it_is_not_divided() -> None:
    decided = decision(machine())
    assert (decided.chosen.micro_batches, decided.chosen.group) == (1, 1)
    assert not any(candidate.refused for candidate in decided.considered)
    assert decided.reason == f"1, with which a simulated step takes {decided.considered[0].seconds:.4g} s"
    assert [candidate.micro_batches for candidate in decided.considered] == [1, 2, 2], (
        "more are not planned: two are no faster"
    )


def test_the_fewest_that_fit_are_taken_by_the_groups_that_hold_less() -> None:
    """What a plan has in memory counts with the values that operators compute with."""
    whole, half = (candidate.device for candidate in decision(machine()).considered[:2])
    grouped = decision(machine()).considered[2].device
    assert grouped < half < whole
    decided = decision(machine(half))
    assert [candidate.micro_batches for candidate in decided.considered if candidate.refused] == [1]
    assert decided.chosen.micro_batches == 2
    assert decided.reason.endswith("; fewer don't fit")
    assert decision(machine(grouped)).chosen == decided.considered[2]
    text = str(decision(machine(grouped)))
    assert re.search("taken +2 by groups of operators", text) and text.count("doesn't fit") >= 2
    assert "1: it needs " in text and "of device memory with what is in flight, which has " in text


def test_more_are_taken_where_that_is_faster() -> None:
    """As where the whole batch has to be computed again within a budget: here with a plan that takes longer."""

    def plans(count: int, group: OperatorGroup) -> Plan:
        return plan_with(8, 1) if count == 1 else plan_with(count, group)

    decided = decision(machine(), plans)
    assert decided.chosen.micro_batches == 2
    assert decided.chosen.seconds < decided.considered[0].seconds
    assert decided.reason.endswith("; fewer take longer")


def test_what_cannot_be_planned_is_listed() -> None:
    def plans(count: int, group: OperatorGroup) -> Plan:
        if count == 1:
            raise BudgetError("the backward graph needs too much\nand a table says what")
        if group == "auto":
            raise ConfigError("the model writes to a buffer")
        return plan_with(count, group)

    decided = decision(machine(), plans)
    writes = "the model writes to a buffer"
    assert [candidate.refused for candidate in decided.considered] == [
        "the backward graph needs too much",
        "",
        writes,
        "",
        writes,
    ]
    assert (decided.chosen.micro_batches, decided.chosen.group) == (2, 1)


def test_nothing_fits() -> None:
    with pytest.raises(
        BudgetError,
        match=r"(?s)none with which a step fits. With 1: it needs.*\nTried:.*  8 by groups of op.*: it needs",
    ):
        decision(machine(1 << 10))


def test_without_a_simulation_the_first_that_fits() -> None:
    half = decision(machine()).considered[1].device
    decided = decision(machine(half, peak={}))
    assert decided.chosen.micro_batches == 2 and decided.chosen.seconds is None
    assert "no step can be simulated, because " in decided.reason
