"""Every preset of ZeRO on several ranks sends the bytes that the plan says, and the paper."""

from __future__ import annotations

import pytest
from gate import slow
from ranks import training
from ranks.launching import on_ranks
from ranks.training import PRESETS, SPREAD

import zinf_fx
from zinf_fx.plan.sharding import Shards


def sent(rank: int, presets: tuple[str, ...]) -> dict[str, tuple[int, int, int]]:
    """Return, by preset: bytes that this rank sent in a step, that the plan says, and that the paper's formula says."""
    by_preset = {}
    for preset in presets:
        # A pack is gathered for backward with biases that backward doesn't need.
        options = {"residency": False, "prefetch": None, "pack": None}
        model = zinf_fx.offload(training.model(), placement=SPREAD if preset == "spread" else preset, **options)
        by_preset[preset] = *training.bytes_sent(model), formula(model, preset, training.world_size())
    return by_preset


def formula(model: training.Model, preset: str, size: int) -> int:
    """Return the bytes of ZeRO, section 7: 2 Psi for data parallelism and stages 1 and 2, 3 Psi for stage 3, of which
    each rank of a ring sends (N - 1) / N. Biases of linear layers are not gathered for backward; what is not trained,
    and used, is."""
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
    for by_preset in on_ranks(size, sent, presets):
        assert by_preset.keys() == set(presets)
        for preset, (counted, planned, expected) in by_preset.items():
            assert counted == planned == expected, preset
