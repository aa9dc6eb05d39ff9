"""Packs over several ranks: one collective for each, as many in a step as the plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from followed import followed_plans
from gate import slow
from ranks import training
from ranks.launching import on_ranks
from runtime.late_device import install
from torch import nn

import zinf_fx
from zinf_fx.plan.memory.accounting import phases
from zinf_fx.plan.packs import may_be_packed
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.simulation.communication import all_gathered, communication, refreshed_tiles

# What torch.distributed is asked for, as torch's own profiler sees it.
CALLS = {"c10d::_allgather_base_": "allgather", "c10d::_reduce_scatter_base_": "reduce", "c10d::allreduce_": "reduce"}


class Moved(NamedTuple):
    """What a rank does in a step: its collectives, bytes that it sends in them, and bytes that it writes to NVMe."""

    collectives: Counter[str]
    sent: int
    written: int


def planned(plan: Plan) -> Moved:
    """Return what the plan says."""
    gathered = [
        live_range
        for live_range in plan.lifetimes
        if live_range.moves("allgather") and all_gathered(plan.tiles[live_range.tile])
    ]
    gathers, reductions = len(gathered) + len(refreshed_tiles(plan)), len(plan.lifetimes.gradient_offloads)
    collectives = Counter(allgather=gathers, reduce=reductions)
    sent = sum(collective.total for collective in communication(plan))
    return Moved(+collectives, sent, sum(traffic.host_to_nvme for _, traffic in phases(plan)))


def counted(rank: int, presets: tuple[str, ...]) -> dict[str, tuple[Moved, Moved]]:
    """By preset, what this rank does in a step in the steady state, and what the plan says."""
    by_preset = {}
    for preset in presets:
        torch._dynamo.reset()
        model = zinf_fx.offload(training.model(), placement=preset, pack="auto")
        run, optimizer = torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
        ((batch,),) = training.batches(1, rank, 1)
        with followed_plans(model) as plans:
            for step in range(3):
                before = zinf_fx.stats(model)
                with torch.profiler.profile() if step == 2 else nullcontext() as profile:
                    run(*batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    optimizer.finish()
        (plan,), after = plans, zinf_fx.stats(model)
        calls = Counter(CALLS[event.name] for event in profile.events() if event.name in CALLS)
        moved = Moved(calls, after.sent_bytes - before.sent_bytes, after.bytes_written - before.bytes_written)
        assert [len(tile.members) for tile in plan.tiles if tile.members] == [10]
        by_preset[preset] = moved, planned(plan)
    return by_preset


@pytest.mark.parametrize(
    ("size", "presets"),
    [
        (2, ("infinity-nvme",)),
        slow(2, ("dp", "zero-1")),
        slow(4, ("dp", "zero-1", "zero-2", "zero-3", "infinity-cpu", "nvme")),
    ],
    ids=str,
)
def test_collectives_of_a_step_are_those_of_the_plan(size: int, presets: tuple[str, ...]):
    for by_preset in on_ranks(size, counted, presets):
        for preset, (moved, expected) in by_preset.items():
            assert moved == expected and moved.collectives["reduce"] == 1, preset


class Apart(nn.Module):
    """Has two modules of small parameters, each offloaded by itself, in one graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).pow(2).mean()


def apart(second: dict[str, Any], pack: object) -> tuple[list, list[set[str]]]:
    """Gradients and trained parameters of `Apart`, of which the second is offloaded with other options; and of which
    modules parameters are in one pack, for each pack."""
    torch._dynamo.reset()
    model = Apart()
    zinf_fx.offload(model.first, placement="zero-3", pack=pack)
    zinf_fx.offload(model.second, **{"placement": "zero-3", "pack": pack, **second})
    run, optimizer = torch.compile(model, backend="zinf"), zinf_fx.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    tensors = []
    with followed_plans(model) as plans:
        for _ in range(3):
            run(torch.randn(5, 24)).backward()
            tensors += [p.grad.full_tensor() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    tensors += [p.full_tensor() for p in model.parameters()]
    plans.append(zinf_fx.export_plan(model, (torch.randn(5, 24),), world_size=2))
    packs_by_plan = [
        [{m.name.split(".")[-3] for m in tile.members} for tile in plan.tiles if tile.members] for plan in plans
    ]
    assert all(packs == packs_by_plan[0] for packs in packs_by_plan)
    return tensors, packs_by_plan[0]


def treated_apart(rank: int, named: Sequence[str]) -> dict[str, bool]:
    """Return, by how the second module differs, whether training with packs is that without them, and no pack has
    both."""
    others = {
        "reduction": {"gradient_reduction": "sum"},
        "dtype": {"reduce_dtype": torch.bfloat16},
        "stage": {"placement": "zero-1"},
        "stage 2": {"placement": "zero-2"},
        "ranks": {"process_group": dist.new_group([0, 1])},
    }
    outcomes = {}
    for what in named:
        options = others[what]
        (values, none), (packed_values, packs) = (apart(options, pack) for pack in (None, "auto"))
        same = all(map(torch.equal, values, packed_values))
        outcomes[what] = same and none == [] and sorted(map(sorted, packs)) == [["first"], ["second"]]
    return outcomes


@pytest.mark.parametrize("named", [slow(["ranks"]), slow(["stage", "dtype", "reduction", "stage 2"])])
def test_parameters_that_are_treated_otherwise_are_in_packs_of_their_own(named: Sequence[str]):
    for outcomes in on_ranks(2, treated_apart, named):
        assert len(outcomes) == len(named) and all(outcomes.values()), outcomes


def on_device_with_memory(rank: int, presets: Sequence[str]) -> list[bool]:
    """Return whether training on a device that has memory of its own gives the same losses and parameters."""
    outcomes = []
    for preset in presets:
        torch._dynamo.reset()
        losses, parameters = training.train_zinf(preset, training.Loop(4))
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            late = install(patch)
            theirs, others = training.train_zinf(preset, training.Loop(4), pack="auto")
        same = losses == theirs and all(torch.equal(parameters[name], others[name]) for name in parameters)
        outcomes.append(same and late.downloads > 0)
    return outcomes


@pytest.mark.slow
def test_packs_on_a_device_with_memory_of_its_own():
    assert on_ranks(2, on_device_with_memory, ["zero-offload", "infinity-cpu", "nvme"]) == [[True] * 3] * 2


def test_what_no_pack_of_many_ranks_has():
    alike = {"dtype": torch.float32, "tier": "nvme", "gradient_tier": "nvme", "ranks": 2, "partitioned": True}
    tile = Tile("one", (64,), shard=2048, **alike)
    assert may_be_packed(tile, "cpu", trained=False)
    for other in ({"owned": True}, {"segment": 32}, {"dtype": torch.int8}, {"shape": (0,)}):
        assert not may_be_packed(replace(tile, **other), "cpu", trained=True)
    resident = replace(tile, tier="device", partitioned=False)
    assert may_be_packed(resident, "cpu", trained=True) and not may_be_packed(resident, "cpu", trained=False)
    alone = replace(resident, ranks=1, shard=0)  # whose gradients move, or nothing
    assert may_be_packed(alone, "cpu", trained=True) and not may_be_packed(alone, "cpu", trained=False)
    assert not may_be_packed(replace(alone, gradient_tier="host"), "cpu", trained=True)
    assert may_be_packed(replace(alone, gradient_tier="host"), "cuda", trained=True)
