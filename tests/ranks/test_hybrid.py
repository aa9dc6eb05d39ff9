"""Hybrid sharding over a two-dimensional mesh trains as DistributedDataParallel, in the bytes that the plan says; and
gradients are summed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import training
from ranks.launching import on_ranks
from ranks.training import ROUNDING, Loop, differences
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zinf_fx
from zinf_fx.errors import ConfigError
from zinf_fx.plan.sharding import Groups, Shards


def mesh_of(replicas: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard"))


def compare(rank: int, cases: list[tuple[str, int]], loop: Loop) -> dict[tuple[str, int], float]:
    """Return, by preset and number of groups, the largest difference to DistributedDataParallel."""
    return {
        (preset, replicas): differences(rank, [preset], loop, mesh=mesh_of(replicas))[0] for preset, replicas in cases
    }


def sent(rank: int, preset: str, replicas: int) -> tuple[int, int, int]:
    """Return bytes that this rank sent in a step, that the plan says, and that the formula says."""
    options = {"residency": False, "prefetch": None, "pack": None}  # as in test_presets
    model = zinf_fx.offload(training.model(), placement=preset, mesh=mesh_of(replicas), **options)
    groups = Groups.of(dist.get_world_size(), replicas, 0 if preset == "dp" else 1)
    return *training.bytes_sent(model), formula(model, preset, groups)


def formula(model: training.Model, preset: str, groups: Groups) -> int:
    """Return the bytes as in test_presets, of a group; and an all-reduce of each gradient's shard over the groups."""
    total = 0
    for name, parameter in model.named_parameters():
        if "unused" in name:
            continue
        shard = 4 * Shards.of(parameter.numel(), groups.shards, parameter.base.config.placement.on_nvme).size
        gathered = 1 if name.endswith("bias") and "norms" not in name else 2
        collectives = (
            gathered if preset in ("zero-3", "infinity-cpu", "infinity-nvme") else int(parameter.requires_grad)
        )
        total += (collectives + parameter.requires_grad) * (groups.shards - 1) * shard
        total += parameter.requires_grad * 2 * (groups.replicas - 1) * -(-shard // groups.replicas)
    return total


def summed(rank: int, placement: str) -> list[float]:
    """Return the gradient of a layer whose inputs are 1 on the first rank and 2 on the second, and more, on the
    others."""
    model = zinf_fx.offload(nn.Linear(64, 64), placement=placement, gradient_reduction="sum", collective_timeout=20)
    torch.compile(model, backend="zinf")(torch.full((1, 64), rank + 1.0)).sum().backward()
    return model.weight.grad.full_tensor().unique().tolist()


def refusals(rank: int) -> list[str]:
    """Errors of what is no mesh to train on."""
    messages = []
    pair = init_device_mesh("cpu", (2,))
    for options in (
        {"mesh": pair, "process_group": dist.group.WORLD},
        {"mesh": "2x1"},
        {"mesh": init_device_mesh("cpu", (2, 1, 1))},
        {"gradient_reduction": "median"},
    ):
        with pytest.raises(ConfigError) as raised:
            zinf_fx.Config(**options)
        messages.append(str(raised.value))
    return messages


def written(rank: int, replicas: int) -> list[float]:
    """Return what ranks agree on after each wrote something else: only each one's shard was taken over, where it has
    one."""
    model = zinf_fx.offload(nn.Linear(64, 64), placement="infinity-nvme", mesh=mesh_of(replicas), collective_timeout=20)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    torch.compile(model, backend="zinf")(torch.ones(1, 64)).sum().backward()
    return model.weight.full_tensor().unique().tolist()


def on_two(rank: int) -> tuple:
    cases = [("infinity-nvme", 2)]
    return (
        compare(rank, cases, Loop(3, micro_batches=2, clip=0.5)),
        [sent(rank, "infinity-nvme", 2)],
        [summed(rank, "zero-3")],
        written(rank, 2),
        refusals(rank),
    )


def test_two_ranks_as_two_groups():
    for apart, counted, sums, values, errors in on_ranks(2, on_two):
        assert apart == {("infinity-nvme", 2): 0.0}  # nothing is partitioned: the norm is summed in PyTorch's order
        for sent_bytes, planned, expected in counted:
            assert sent_bytes == planned == expected
        assert sums == [[3.0]]
        assert values == [0.0]
        for error, part in zip(errors, ("both say", "not a torch.distributed", "3 dimensions", "'mean'"), strict=True):
            assert part in error


CASES = [("dp", 2), ("zero-1", 2), ("zero-2", 2), ("zero-3", 2), ("infinity-nvme", 2), ("infinity-cpu", 4)]


@pytest.mark.slow
@pytest.mark.parametrize("loop", [Loop(), Loop(micro_batches=2, clip=0.5)], ids=["plainly", "accumulating, clipped"])
def test_four_ranks_in_groups_train_as_distributed_data_parallel(loop: Loop):
    for apart in on_ranks(4, compare, CASES, loop):
        assert len(apart) == len(CASES) and max(apart.values()) < ROUNDING, apart


def counted(rank: int) -> tuple:
    return {case: sent(rank, *case) for case in CASES}, written(rank, 2)


@pytest.mark.slow
def test_what_four_ranks_in_groups_send_and_agree_on():
    for counts, values in on_ranks(4, counted):
        assert all(sent_bytes == planned == expected for sent_bytes, planned, expected in counts.values()), counts
        assert values == [0.0, 1.0]  # each of the second group took over the shard of the first's
