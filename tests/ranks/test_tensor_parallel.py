"""Models parallelised by PyTorch's tensor parallelism, then offloaded, are sharded further over data-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import tensor_parallel as tp
from ranks.launching import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zinf_fx
from zinf_fx.errors import ConfigError, StoredTensorError

# Of fp32 sums in another order, over a few steps.
ROUNDING = 2e-6


def difference(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert some.keys() == others.keys()
    return max((value - others[name]).abs().max().item() for name, value in some.items())


def as_plain(rank: int, cases: list[tuple[Any, bool, bool]], steps: int = 2) -> list[tuple[bool, float]]:
    """By case (placement, whether sequences are divided, whether compiled): whether losses equal those of PyTorch's
    tensor parallelism, and the largest difference of a parameter at the end."""
    outcomes = []
    mesh = tp.mesh_of(1, 2)
    for placement, sequence, compiled in cases:
        plain = tp.parallel(tp.model(), mesh["tp"], sequence)
        expected = tp.train(plain, torch.optim.AdamW(tp.groups(plain), lr=1e-2, fused=True), (0, 1), steps)
        gpt = tp.parallel(tp.model(), mesh["tp"], sequence)
        optimizer = zinf_fx.optim.AdamW(gpt.parameters(), lr=1e-2)  # before, as identity is kept
        parameters = list(gpt.parameters())
        with pytest.raises(ConfigError, match="give those with equal parts"):  # before anything is changed
            zinf_fx.offload(gpt, placement=placement, process_group=dist.group.WORLD)
        zinf_fx.offload(gpt, placement=placement)
        assert all(a is b for a, b in zip(parameters, gpt.parameters(), strict=True))
        run = torch.compile(gpt, backend="zinf") if compiled else gpt
        losses = tp.train(run, optimizer, (0, 1), steps)
        outcomes.append((losses == expected, difference(tp.values(gpt), tp.values(plain))))
    return outcomes


def test_eager_code_on_two_ranks_trains_bitwise_as_plain_tensor_parallelism():
    """What is compiled does: see test_partitioned_activations.py."""
    for outcomes in on_ranks(2, as_plain, [("host", True, False)]):
        assert outcomes == [(True, 0.0)]


@pytest.mark.slow
def test_two_ranks_train_bitwise_as_plain_tensor_parallelism():
    cases = [("nvme", False, True), ("zero-2", True, True), ("infinity-cpu", False, False)]
    for outcomes in on_ranks(2, as_plain, cases):
        assert outcomes == [(True, 0.0)] * len(cases)


def as_alone(rank: int, presets: list[str], options: dict[str, Any], compiled: bool) -> list[float]:
    """By preset, the largest difference to parameters that one process trains. 2 x 2 ranks."""
    mesh = tp.mesh_of(2, 2)
    clip = options.get("clip")
    alone = tp.train_alone(4, 2, options.get("micro_batches", 1), clip)
    apart = []
    for preset in presets:
        gpt = zinf_fx.offload(tp.parallel(tp.model(), mesh["tp"]), placement=preset)
        assert gpt.head.weight.to_local().base.config.process_group is mesh["dp"].get_group()
        run = torch.compile(gpt, backend="zinf") if compiled else gpt
        optimizer = zinf_fx.optim.AdamW(gpt.parameters(), **tp.STEPS)
        tp.train(run, optimizer, (mesh["dp"].get_local_rank(), 2), 4, no_sync=zinf_fx.no_sync, **options)
        apart.append(difference(tp.values(gpt), alone))
    return apart


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_tensor_and_data_parallel_ranks_train_as_one_process(compiled: bool):
    presets = ["dp", "zero-1", "zero-2", "zero-3", "infinity-nvme", "nvme"] if compiled else ["zero-2", "nvme"]
    for differences in on_ranks(4, as_alone, presets, {}, compiled):
        assert len(differences) == len(presets) and max(differences) < ROUNDING


@pytest.mark.slow
def test_accumulation_without_synchronisation_and_clipping():
    options = {"micro_batches": 2, "clip": 0.5}
    for differences in on_ranks(4, as_alone, ["zero-1", "infinity-nvme"], options, True):
        assert max(differences) < ROUNDING


def checked_features(rank: int) -> dict[str, Any]:
    """Return what users look at, on 2 x 2 ranks."""
    mesh, pipeline = tp.mesh_of(2, 2), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "mp"))
    plain = tp.parallel(tp.model(tied=True), mesh["tp"])
    gpt = tp.parallel(tp.model(tied=True), mesh["tp"])
    with pytest.raises(ConfigError, match="doesn't tell which ranks train"):
        zinf_fx.offload(tp.parallel(tp.model(), pipeline["mp"]), placement="host")
    with pytest.raises(StoredTensorError, match="fully_shard"):
        zinf_fx.offload(fully_shard(nn.Linear(4, 4), mesh=mesh["dp"]), placement="host")
    zinf_fx.offload(gpt, placement="infinity-cpu")
    weight, expected = gpt.layers[0].up.weight, plain.layers[0].up.weight
    outcomes: dict[str, Any] = {"tied": gpt.head.weight is gpt.tokens.weight}
    outcomes["values"] = difference(tp.values(gpt), tp.values(plain)) == 0.0
    outcomes["state dict"] = torch.equal(gpt.state_dict()["layers.0.up.weight"].full_tensor(), expected.full_tensor())
    with zinf_fx.gathered(weight, modify=True) as value:
        value += 1
    outcomes["written"] = torch.equal(weight.full_tensor(), expected.full_tensor() + 1)
    local = weight.to_local()
    outcomes["shard"] = len(local.to_local()) == sum(map(len, local.stored.shard.own)) < local.numel()
    run = torch.compile(gpt, backend="zinf")
    optimizer = zinf_fx.optim.AdamW(gpt.parameters(), **tp.STEPS)
    tp.train(run, optimizer, (mesh["dp"].get_local_rank(), 2), 1)
    ((of_ranks,),) = tp.batches(1, 2, 1)
    run(*of_ranks[mesh["dp"].get_local_rank()]).backward()
    outcomes["gradient"] = isinstance(weight.grad, DTensor) and weight.grad.placements == weight.placements
    state = optimizer.state_dict()["state"]
    number = [p is weight for p in gpt.parameters()].index(True)
    moment = state[number]["exp_avg"]
    outcomes["state"] = isinstance(moment, DTensor) and moment.placements == weight.placements
    again = zinf_fx.optim.AdamW(gpt.parameters(), **tp.STEPS)
    again.load_state_dict(optimizer.state_dict())
    outcomes["loaded"] = torch.equal(again.state[weight]["exp_avg"].full_tensor(), moment.full_tensor())
    optimizer.zero_grad()
    outcomes["explained"] = "ZeRO stage 3" in zinf_fx.explain(gpt, *of_ranks[0], world_size=2)
    return outcomes


@pytest.mark.slow
def test_what_users_look_at():
    for outcomes in on_ranks(4, checked_features):
        assert outcomes == dict.fromkeys(outcomes, True)


def plain_fused(rank: int) -> bool:
    """Return whether PyTorch's own fused AdamW steps as over a plain model."""
    mesh = tp.mesh_of(1, 2)
    losses = []
    for offloads in (False, True):
        gpt = tp.parallel(tp.model(), mesh["tp"])
        if offloads:
            zinf_fx.offload(gpt, placement="nvme")
        losses.append(tp.train(gpt, torch.optim.AdamW(tp.groups(gpt), lr=1e-2, fused=True), (0, 1), 3))
    return losses[0] == losses[1]


@pytest.mark.slow
def test_plain_fused_optimizers_step_distributed_parameters():
    assert on_ranks(2, plain_fused) == [True, True]
