"""Every preset of ZeRO on several ranks: the training of DistributedDataParallel, in the bytes that the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gate import slow
from ranks import training
from ranks.launching import on_ranks

import zinf_fx
from zinf_fx.plan.sharding import Shards

PRESETS = ("dp", "zero-1", "zero-2", "zero-3", "zero-offload", "infinity-cpu", "infinity-nvme", "nvme")

# States of each parameter on tiers of their own.
SPREAD = {
    "parameters": [("layers.0.*", "device"), ("norms.1.*", "host"), ("*", "nvme")],
    "gradients": [("layers.?.bias", "nvme"), ("norms.*", "device"), ("*", "host")],
    "optimizer": [("layers.1.*", "device"), ("norms.*", "nvme"), ("*", "host")],
}

# Of fp32 sums in another order, over ten steps.
ROUNDING = 1e-5


def placement_of(preset: str) -> object:
    return SPREAD if preset == "spread" else preset


def compare(rank: int, presets: tuple[str, ...], options: dict[str, Any], compiled: bool) -> dict[str, float]:
    """By preset, the largest difference to DistributedDataParallel, in losses and in parameters at the end."""
    losses, parameters = training.train_ddp(**options)
    found = {}
    for preset in presets:
        mine, trained, _ = training.train_zinf(placement_of(preset), compiled=compiled, **options)
        assert trained.keys() == parameters.keys()
        differences = [abs(a - b) for a, b in zip(mine, losses, strict=True)]
        found[preset] = max(*differences, *((trained[n] - p).abs().max().item() for n, p in parameters.items()))
    return found


# In the gate, test_order_on_ranks has dp, test_lengths zero-2 and infinity-nvme, test_optimizer_steps zero-1, and
# test_owners nvme; "spread" has parameters that are divided on the device, as all of zero-3 are.
@pytest.mark.parametrize(
    ("presets", "steps"),
    [(("spread",), 3), slow((*PRESETS, "spread"), 10)],
)
def test_two_ranks_train_bitwise_as_distributed_data_parallel(presets: tuple[str, ...], steps: int):
    for differences in on_ranks(2, compare, presets, {"steps": steps}, True):
        assert differences == dict.fromkeys(presets, 0.0)


@pytest.mark.slow
def test_four_ranks_train_as_distributed_data_parallel():
    for differences in on_ranks(4, compare, PRESETS, {}, True):
        assert differences.keys() == set(PRESETS) and max(differences.values()) < ROUNDING


@pytest.mark.slow  # in the gate, test_hybrid and test_owners have it, in groups and in tiles
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_accumulation_without_synchronisation_and_clipping(compiled: bool):
    options = {"steps": 3, "micro_batches": 2, "clip": 0.5}
    for differences in on_ranks(2, compare, ("dp", "zero-1", "infinity-nvme"), options, compiled):
        assert differences["dp"] == 0.0 and max(differences.values()) < ROUNDING


def sent(rank: int, presets: tuple[str, ...]) -> dict[str, tuple[int, int, int]]:
    """By preset: bytes that this rank sent in a step, that the plan says, and that the paper's formula says."""
    found = {}
    for preset in presets:
        # A pack is gathered for backward with biases that backward doesn't need.
        model = zinf_fx.offload(
            training.model(), placement=placement_of(preset), residency=False, prefetch=None, pack=None
        )
        found[preset] = *training.bytes_sent(model), formula(model, preset, torch.distributed.get_world_size())
    return found


def formula(model: training.Model, preset: str, size: int) -> int:
    """ZeRO, section 7: 2 Psi for data parallelism and stages 1 and 2, 3 Psi for stage 3, of which each rank of a ring
    sends (N - 1) / N. Biases of linear layers are not gathered for backward; what is not trained, and used, is."""
    total = 0
    for name, parameter in model.named_parameters():
        if "unused" in name:
            continue
        numel = parameter.numel()
        padded = numel if preset == "dp" else Shards.of(numel, size, parameter.base.config.placement.on_nvme).padded
        gathered = 1 if name.endswith("bias") and "norms" not in name else 2
        volumes = gathered + 1 if preset in ("zero-3", "infinity-cpu", "infinity-nvme", "nvme", "spread") else 2
        if not parameter.requires_grad:
            volumes = gathered if volumes == 3 else 0
        total += volumes * 4 * padded * (size - 1) // size
    return total


# Those of stage 3, which are stored in shards of whole blocks, or, among "spread", of elements.
@pytest.mark.parametrize(
    ("size", "presets"),
    [(2, ("infinity-nvme",)), slow(2, ("spread", "dp", "zero-2", "zero-3")), slow(4, PRESETS)],
    ids=str,
)
def test_bytes_sent_are_those_of_the_plan_and_of_the_papers_formula(size: int, presets: tuple[str, ...]):
    for found in on_ranks(size, sent, presets):
        assert found.keys() == set(presets)
        for preset, (counted, planned, expected) in found.items():
            assert counted == planned == expected, preset
