"""Packs over several ranks: one collective for each, as many in a step as the plan says, and the same training."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from followed import followed_plans
from ranks import training
from ranks.launching import on_ranks

import zinf_fx
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.communication import all_gathered, communication, refreshed_tiles

# What torch.distributed is asked for, as torch's own profiler sees it.
CALLS = {"c10d::_allgather_base_": "allgather", "c10d::_reduce_scatter_base_": "reduce", "c10d::allreduce_": "reduce"}


def planned(plan: Plan) -> Counter[str]:
    """The collectives of a step."""
    found = Counter(allgather=len(refreshed_tiles(plan)), reduce=len(plan.journeys.departures))
    gathered = [stay for stay in plan.journeys if stay.moves("allgather") and all_gathered(plan.tiles[stay.tile])]
    found["allgather"] += len(gathered)
    return found


def counted(rank: int, presets: tuple[str, ...]) -> dict[str, tuple[Counter[str], Counter[str], int, int, int]]:
    """By preset, of a step in the steady state: collectives, and bytes that this rank sends, counted and planned; and
    how many packs there are."""
    found = {}
    for preset in presets:
        torch._dynamo.reset()
        model = zinf_fx.offload(training.model(), placement=preset, pack="auto")
        run, optimizer = torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
        ((batch,),) = training.batches(1, rank, 1)
        with followed_plans(model) as plans:
            for step in range(3):
                sent = zinf_fx.stats(model).sent_bytes
                with torch.profiler.profile() if step == 2 else nullcontext() as profile:
                    run(*batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        (plan,) = plans
        calls = Counter(CALLS[event.name] for event in profile.events() if event.name in CALLS)
        sent = zinf_fx.stats(model).sent_bytes - sent
        packs = sum(bool(tile.members) for tile in plan.tiles)
        found[preset] = calls, planned(plan), sent, sum(each.total for each in communication(plan)), packs
    return found


@pytest.mark.parametrize(
    ("size", "presets"),
    [
        (2, ("dp", "zero-1", "infinity-nvme")),
        pytest.param(4, ("dp", "zero-1", "zero-2", "zero-3", "infinity-cpu", "nvme"), marks=pytest.mark.slow),
    ],
    ids=["2", "4"],
)
def test_collectives_of_a_step_are_those_of_the_plan(size: int, presets: tuple[str, ...]):
    for found in on_ranks(size, counted, presets):
        for preset, (calls, expected, sent, planned_bytes, packs) in found.items():
            assert packs and calls == +expected and sent == planned_bytes, preset
            assert expected["reduce"] == 1, preset  # of 14 gradients
