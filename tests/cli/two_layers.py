"""The command-line target is that of examples/gpt.py's `small`, planned in half the time."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig, example_batch


def gpt() -> tuple[GPT, tuple[Tensor, Tensor]]:
    config = GPTConfig(layers=2)
    return GPT(config), example_batch(config, batch=4)


def one_layer() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """For what is planned again and again."""
    config = GPTConfig(layers=1)
    return GPT(config), example_batch(config, batch=4)
