"""Layers of one size, whose update benchmarks measure."""

from __future__ import annotations

import torch

WIDTH = 4096
"""The features that each layer takes and gives."""


def linear_layers(parameters: int) -> torch.nn.Sequential:
    """Make as few layers without biases, in bf16, as have so many parameters together."""
    count = -(-parameters // WIDTH**2)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(count)))


def example_input() -> torch.Tensor:
    """Return an input of one row for the layers, [1, WIDTH], in bf16."""
    return torch.ones(1, WIDTH, dtype=torch.bfloat16)
