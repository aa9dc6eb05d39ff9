"""Models, and options to train them with, whose peaks of memory are compared with what their plans say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Shape:
    """A model, a batch, and the options that it trains with; `states`: those of its optimizer."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    options: dict[str, object]
    states: dict[str, str] = field(default_factory=dict)


class Wide(nn.Module):
    """One layer is larger than the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 4096), nn.Linear(4096, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.up(x).relu())).square().mean()


class Written(Wide):
    """Forward writes to a layer's weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.down.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


def gpt(layers: int, hidden: int, tied: bool = True, dtype: torch.dtype = torch.float32) -> Callable[[], nn.Module]:
    config = GPTConfig(layers=layers, hidden=hidden, heads=4, context=32, vocabulary=1000, tied=tied)
    return lambda: GPT(config).to(dtype)


def tokens() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 1000, (2, 32)), torch.randint(0, 1000, (2, 32))


def wide() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 1000, (16, 32)), torch.randint(0, 1000, (16, 32))


def rows() -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, 256),)


SPREAD = {
    "parameters": [("blocks.0.*", "device"), ("blocks.1.*", "host"), ("*norm*", "device"), ("*", "nvme")],
    "gradients": [("blocks.[23].*", "nvme"), ("blocks.1.*", "device"), ("*", "host")],
    "optimizer": [("blocks.1.*", "host"), ("blocks.0.attention.*", "device"), ("*", "nvme")],
}
SHAPES = {
    "wide, tiled": Shape(Wide, rows, {"placement": "nvme", "device_memory": "3MiB", "chunk": "256KiB"}),
    "written": Shape(Written, rows, {"placement": "nvme", "chunk": "256KiB"}),
    "written, within a host budget": Shape(Written, rows, {"placement": "nvme", "host_memory": "20MiB"}),
    "deep": Shape(gpt(4, 128), tokens, {"placement": "nvme", "device_memory": "4MiB", "chunk": "128KiB"}),
    "broad": Shape(gpt(2, 512), tokens, {"placement": "infinity-nvme", "chunk": "4MiB"}),
    "untied, bf16": Shape(gpt(2, 256, False, torch.bfloat16), tokens, {"placement": "nvme", "chunk": "1MiB"}),
    "bf16, states of fewer bytes": Shape(
        gpt(2, 256, False, torch.bfloat16),
        tokens,
        {"placement": "nvme", "chunk": "1MiB"},
        {"state_dtype": "8bit", "master_dtype": "split"},
    ),
    "in host memory": Shape(gpt(2, 256), tokens, {"placement": "infinity-cpu"}),
    "within a host budget": Shape(gpt(2, 256), tokens, {"placement": "infinity-nvme", "host_memory": "24MiB"}),
    "recomputed": Shape(gpt(2, 256), tokens, {"placement": "nvme", "activations": "recompute", "chunk": "8MiB"}),
    "activations on disk": Shape(gpt(2, 256), wide, {"placement": "nvme", "activations": "offload", "chunk": "1MiB"}),
    "activations on disk, gradients in host memory": Shape(
        gpt(2, 256), wide, {"placement": "infinity-nvme", "activations": "offload", "chunk": "1MiB"}
    ),
    "activations on disk, within a device budget": Shape(
        gpt(2, 256), wide, {"placement": "nvme", "activations": "offload", "chunk": "1MiB", "device_memory": "8MiB"}
    ),
    "activations on disk, within a host budget": Shape(
        gpt(2, 256), wide, {"placement": "infinity-nvme", "activations": "offload", "host_memory": "28MiB"}
    ),
    "spread over the tiers": Shape(gpt(4, 256), tokens, {"placement": SPREAD, "chunk": "256KiB"}),
    "spread over the tiers, within a host budget": Shape(
        gpt(4, 256), tokens, {"placement": SPREAD, "chunk": "256KiB", "host_memory": "24MiB"}
    ),
    "activations in host memory": Shape(gpt(2, 256), wide, {"placement": "infinity-cpu", "activations": "offload"}),
}
