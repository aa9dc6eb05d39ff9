"""A training in another library's folder: weights as safetensors files, and beside them a checkpoint of all else."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim import Optimizer

from zinf_fx.checkpoint.entries import ModulePart, Parts, RandomPart, parts_of
from zinf_fx.checkpoint.load import load
from zinf_fx.checkpoint.save import save
from zinf_fx.runtime.tensor.local_parameter import stored_parameter

# The folder of the checkpoint, in that of the other library.
STATES = "zinf"


def is_stored(model: torch.nn.Module) -> bool:
    """Whether any parameter of a model is in the store."""
    return any(stored_parameter(parameter) is not None for parameter in model.parameters())


def save_beside_weights(directory: Path, model: torch.nn.Module, optimizer: Optimizer | None, **extra: object) -> None:
    """As `save_checkpoint`, without weights and buffers of models, which give parameters their names here, and without
    the states of random generators."""
    save(directory, _without_weights(parts_of(model, optimizer, extra)))


def load_beside_weights(directory: Path, model: torch.nn.Module, optimizer: Optimizer | None, **extra: object) -> None:
    """Load what `save_beside_weights` saved, as `load_checkpoint` does. The weights are to be loaded before."""
    load(directory, _without_weights(parts_of(model, optimizer, extra)), [])


def _without_weights(parts: Parts) -> Parts:
    return {name: part for name, part in parts.items() if not isinstance(part, (ModulePart, RandomPart))}
