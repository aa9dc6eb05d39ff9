"""A training in another library's folder: weights as safetensors files, and beside them a checkpoint of all else."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim import Optimizer

from zinf_fx.checkpoint.entries import ModuleEntry, RandomEntry, StateEntries, state_entries
from zinf_fx.checkpoint.load import load
from zinf_fx.checkpoint.save import save
from zinf_fx.runtime.tensor.local_parameter import stored_parameter

# The folder of the checkpoint, in that of the other library.
STATES = "zinf"


def is_stored(model: torch.nn.Module) -> bool:
    """Whether any parameter of a model is in the store."""
    return any(stored_parameter(parameter) is not None for parameter in model.parameters())


def save_beside_weights(directory: Path, model: torch.nn.Module, optimizer: Optimizer | None, **extra: object) -> None:
    """Save a checkpoint without the weights and buffers of models, which only name the parameters here, and without the
    states of random generators."""
    save(directory, _without_weights(state_entries(model, optimizer, extra)))


def load_beside_weights(directory: Path, model: torch.nn.Module, optimizer: Optimizer | None, **extra: object) -> None:
    """Load what `save_beside_weights` saved, as `load_checkpoint` does. The weights are to be loaded before."""
    load(directory, _without_weights(state_entries(model, optimizer, extra)), [])


def _without_weights(entries: StateEntries) -> StateEntries:
    return {name: entry for name, entry in entries.items() if not isinstance(entry, (ModuleEntry, RandomEntry))}
