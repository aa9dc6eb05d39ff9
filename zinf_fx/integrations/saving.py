"""A training in another library's folder: weights as safetensors files, and beside them a checkpoint of all else."""

from __future__ import annotations

import torch

from zinf_fx.runtime.tensor.local_parameter import stored_parameter

# The folder of the checkpoint, in that of the other library.
STATES = "zinf"


def is_stored(model: torch.nn.Module) -> bool:
    """Whether any parameter of a model is in the store."""
    return any(stored_parameter(parameter) is not None for parameter in model.parameters())
