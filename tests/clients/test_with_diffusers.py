"""Denoising networks of diffusers train as in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from rows import Row, compare_training
from torch import nn


def unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip


def dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, dropout=0.0,
    )  # fmt: skip


def autoencoder() -> nn.Module:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 16), norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def noisy(name: str, channels: int, size: int = 8, **more: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return batches of a denoising step: what a scheduler makes of clean samples, and the time of each."""
    scheduler, random = diffusers.DDPMScheduler(), torch.Generator().manual_seed(1)
    batches = []
    for _ in range(3):
        clean, noise = torch.randn(2, 2, channels, size, size, generator=random)
        times = torch.randint(1000, (2,), generator=random)
        sample = scheduler.add_noise(clean, noise, times)
        batches.append({name: sample, "timestep": times} | more)
    return batches


CASES = {
    "`UNet2DModel`, a denoising step": (unet, noisy("sample", 3)),
    "`DiTTransformer2DModel`, a denoising step": (dit, noisy("hidden_states", 4, class_labels=torch.tensor([1, 2]))),
    "`AutoencoderKL`": (autoencoder, [{"sample": batch["sample"]} for batch in noisy("sample", 3, 16)]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.row("diffusers", f"{name}; offload()")) for name in CASES]
)
def test_training(row: Row, tmp_path: Path, name: str) -> None:
    make, batches = CASES[name]
    compare_training(row, make, batches, tmp_path / "store")
