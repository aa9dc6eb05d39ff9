"""Checkpoints of what a training has besides its weights, where another library says which files those are in."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim import Optimizer

from zinf_fx.checkpoint.training.contents import Parts, parts_of
from zinf_fx.checkpoint.training.loading import load
from zinf_fx.checkpoint.training.parts.module import ModulePart
from zinf_fx.checkpoint.training.parts.randomness import RandomPart
from zinf_fx.checkpoint.training.saving import save


def save_beside_weights(directory: Path, model: torch.nn.Module, optimizer: Optimizer | None, **extra: object) -> None:
    """As `save_checkpoint`, without weights and buffers of models, which give parameters their names here, and without
    the states of random generators."""
    save(directory, _without_weights(parts_of(model, optimizer, extra)))


def load_beside_weights(directory: Path, model: torch.nn.Module, optimizer: Optimizer | None, **extra: object) -> None:
    """Load what `save_beside_weights` saved, as `load_checkpoint` does. The weights are to be loaded before."""
    load(directory, _without_weights(parts_of(model, optimizer, extra)), [])


def _without_weights(parts: Parts) -> Parts:
    return {name: part for name, part in parts.items() if not isinstance(part, (ModulePart, RandomPart))}
