"""A model's tensors by the names that files have them under."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._dynamo import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zinf_fx.config import Config
from zinf_fx.errors import CheckpointError
from zinf_fx.runtime.tensor.local_parameter import made_of, stored_parameter
from zinf_fx.runtime.tensor.tensor_parallel import tensor_ranks


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's model, without what `torch.compile` and DistributedDataParallel put around it."""
    return _layers_of(model)[-1]


def _layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """A model, and what it is put around: the user's model comes last."""
    layers = [model]
    while isinstance(model, (OptimizedModule, DistributedDataParallel)):
        model = model._orig_mod if isinstance(model, OptimizedModule) else model.module
        layers.append(model)
    return layers


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The entries of the model's state dict, themselves: parameters and buffers that are saved.

    Raises: CheckpointError for one that is no tensor, or has no values.
    """
    found = model.state_dict(keep_vars=True)
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"'{name}' in the state dict is a {type(value).__name__}, and safetensors files have tensors only: "
                "save it by itself, with torch.save or as JSON"
            )
        if parts := made_of(value):
            raise CheckpointError(
                f"'{name}' in the state dict is a {type(value).__name__}, made of {', '.join(parts)}, and safetensors "
                "files have ordinary tensors only: save_checkpoint() and load_checkpoint() take what it is made of"
            )
        check_has_values(value, f"'{name}' in the state dict")
    return dict(found)


def check_has_values(tensor: torch.Tensor, what: str) -> None:
    """Raises: CheckpointError unless each element of the tensor lies somewhere, at a stride. `what`: the tensor."""
    if tensor.is_meta or tensor.layout != torch.strided:
        found = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise CheckpointError(f"{what} is {found}: only tensors with strided values are saved and loaded")


def names_of_tied(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """The names of each tensor, that first which files have it under: of tied weights, the first that is not declared
    to be tied to another, as models of transformers do."""
    by_identity: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_identity.setdefault(id(tensor), []).append(name)
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    return [sorted(names, key=lambda name: name in declared) for names in by_identity.values()]


class Everyone:
    """The ranks that have parts of a model's tensors, or copies of a model that DistributedDataParallel is put around.

    Attributes:
        ranks: this one's groups of them.
        is_first: whether this is the first of all.
    """

    def __init__(self, model: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> None:
        """`model`: as the user has it; `tensors`: of the model itself."""
        tensors = list(tensors)
        stored = [one for one in map(stored_parameter, tensors) if one is not None]
        config = stored[0].storage.config if stored else Config()
        meshes = list(dict.fromkeys(one.device_mesh for one in tensors if isinstance(one, DTensor)))
        self.ranks = list(dict.fromkeys(one.storage.share.ranks for one in stored))
        if not stored and not meshes:
            replicated = (one for one in _layers_of(model) if isinstance(one, DistributedDataParallel))
            self.ranks = [tensor_ranks(config, one.process_group) for one in replicated]
        self.is_first = all(ranks.rank == 0 for ranks in self.ranks)
        for mesh in meshes:
            self.is_first = self.is_first and not any(mesh.get_coordinate() or ())
            self.ranks += [tensor_ranks(config, group) for group in mesh.get_all_groups()]
