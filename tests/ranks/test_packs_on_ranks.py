"""Packs over several ranks: one collective for each, as many in a step as the plan says, and the same training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from followed import followed_plans
from ranks import training
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.communication import all_gathered, communication, refreshed_tiles

Outcome = tuple[list, nn.Module, torch.optim.Optimizer]
Scenario = Callable[[int, dict[str, Any]], Outcome]

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


def same_as_without(rank: int, scenario: Scenario, preset: str) -> tuple[bool, bool]:
    """Whether what is done with single parameters of packs gives what it does without packs: losses, and parameters
    with their states."""
    both = []
    for pack in (None, "auto"):
        torch._dynamo.reset()
        losses, model, optimizer = scenario(rank, {"placement": preset, "pack": pack})
        tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
        both.append((losses, [t.full_tensor() if isinstance(t, zinf_fx.StoredTensor) else t for t in tensors]))
    (losses, values), (packed_losses, packed_values) = both
    return losses == packed_losses, all(map(torch.equal, values, packed_values))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence, *, accumulate: bool = False) -> list:
    """The losses of a step for each batch; or of a single one, of which all backward passes but the last don't
    synchronise."""
    run, losses = torch.compile(model, backend="zinf"), []
    for number, batch in enumerate(batches, start=1):
        with zinf_fx.no_sync() if accumulate and number < len(batches) else nullcontext():
            loss = run(*batch)
            loss.backward()
        losses.append(loss.item())
        if not accumulate or number == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return losses


def made(model: nn.Module) -> torch.optim.Optimizer:
    return zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)


def micro_batches(rank: int) -> list:
    return [batch for (batch,) in training.batches(3, rank, 1)]


def accumulated(rank: int, options: dict[str, Any]) -> Outcome:
    """With and without synchronisation; one gradient is dropped in between, so that its pack arrives in parts."""
    model = zinf_fx.offload(training.model(), **options)
    optimizer, run = made(model), torch.compile(model, backend="zinf")
    losses = train(model, optimizer, micro_batches(rank), accumulate=True)
    run(*micro_batches(rank)[0]).backward()
    model.norms[1].weight.grad = None
    return losses + train(model, optimizer, micro_batches(rank)[1:], accumulate=True), model, optimizer


def partly_frozen(rank: int, options: dict[str, Any]) -> Outcome:
    """One parameter is frozen for some steps, and another written to by hand."""
    model = zinf_fx.offload(training.model(), **options)
    optimizer, losses = made(model), []
    for frozen in (False, True, False):
        model.layers[1].weight.requires_grad_(not frozen)
        losses += train(model, optimizer, micro_batches(rank)[:2])
        with torch.no_grad():
            model.layers[2].bias.mul_(2)
    return losses, model, optimizer


def built_and_loaded(rank: int, options: dict[str, Any]) -> Outcome:
    """A model that is built piece by piece, whose parameters don't lie side by side, and takes over
    another one's states."""
    first = zinf_fx.offload(training.model(), **options)
    trained = made(first)
    losses = train(first, trained, micro_batches(rank))
    with zinf_fx.offloading(**options):
        model = training.Model()
    model.load_state_dict(first.state_dict())
    optimizer = made(model)
    optimizer.load_state_dict(trained.state_dict())
    return losses + train(model, optimizer, micro_batches(rank)), model, optimizer


@pytest.mark.parametrize(
    ("scenario", "preset"),
    [
        (accumulated, "nvme"),
        (partly_frozen, "zero-2"),
        *(
            pytest.param(scenario, preset, marks=pytest.mark.slow)
            for scenario in (accumulated, partly_frozen, built_and_loaded)
            for preset in ("zero-1", "zero-3", "infinity-nvme")
        ),
    ],
)
def test_single_parameters_of_packs_are_what_they_are_without(scenario: Scenario, preset: str):
    assert on_ranks(2, same_as_without, scenario, preset) == [(True, True)] * 2
