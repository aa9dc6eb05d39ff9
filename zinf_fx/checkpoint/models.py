"""A model as files have it: the names of its tensors, and the ranks that save and load it together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._dynamo import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zinf_fx.config import Config
from zinf_fx.errors import CheckpointError, DamagedCheckpointError
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.local_parameter import made_of, stored_in, stored_parameter
from zinf_fx.runtime.tensor.tensor_parallel import tensor_ranks

T = TypeVar("T")

WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The member of a wrapper that is the user's module: of torch.compile, FullyShardedDataParallel, and PyTorch's wrapper
for activation checkpointing."""


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's model, without what `torch.compile` and DistributedDataParallel put around it."""
    return _layers_of(model)[-1]


def _layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model and the models that it wraps: the user's model comes last."""
    layers = [model]
    while isinstance(model, (OptimizedModule, DistributedDataParallel)):
        model = model._orig_mod if isinstance(model, OptimizedModule) else model.module
        layers.append(model)
    return layers


def plain_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map qualified names of a model's members to those that they would have without the wrappers around parts of the
    model. Members that would have one name keep theirs."""
    plain = {name: _plain(model, name) for name in names}
    owners = Counter(plain.values())
    return {name: own if owners[own] == 1 else name for name, own in plain.items()}


def by_plain_name(model: torch.nn.Module, members: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return members of a model, such as `named_parameters()` gives, by the names of `plain_names`."""
    known = dict(members)
    return {own: known[name] for name, own in plain_names(model, known).items()}


def _plain(model: torch.nn.Module, name: str) -> str:
    kept: list[str] = []
    module: torch.nn.Module | None = model
    for part in name.split("."):
        inner = _wrapped_member(module)
        # A wrapper may leave itself out of names.
        while module is not None and inner not in (None, part) and part not in module._modules:
            module = module._modules[inner]
            inner = _wrapped_member(module)
        if inner != part:
            kept.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def _wrapped_member(module: torch.nn.Module | None) -> str | None:
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return "module"
    return None if module is None else next((name for name in WRAPPED if name in module._modules), None)


def as_named(model: torch.nn.Module, in_files: Mapping[str, T], wanted: Collection[str]) -> dict[str, T]:
    """Return what files have by the names of a model's members, `wanted`, which are plain. Files may have been written
    from a model with wrappers around its parts, those that this one has or others."""
    own_names = plain_names(model, model.state_dict(keep_vars=True))
    named = {name: value for name, value in in_files.items() if name in wanted}
    for name, value in in_files.items():
        if name not in wanted:
            own = own_names.get(name) or ".".join(part for part in name.split(".") if part not in WRAPPED)
            named[name if own in in_files or own in named else own] = value
    return named


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the entries of the model's state dict, themselves, by their plain names: parameters and buffers that are
    saved.

    Raises: CheckpointError for one that is no tensor, or has no values.
    """
    tensors = by_plain_name(model, model.state_dict(keep_vars=True).items())
    for name, value in tensors.items():
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
    return tensors


def check_has_values(tensor: torch.Tensor, what: str) -> None:
    """Raises: CheckpointError unless each element of the tensor lies somewhere, at a stride. `what`: the tensor."""
    if tensor.is_quantized:
        raise CheckpointError(
            f"{what} is of {tensor.dtype}, whose values need a scale besides the elements: save its int_repr() and its "
            "scale, or dequantize() it"
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        why = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise CheckpointError(f"{what} is {why}: only tensors with strided values are saved and loaded")


def names_of_tied(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each tensor, beginning with that which files have: of tied weights, the first that the model
    doesn't declare to be tied to another, as models of transformers do."""
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
        stored = [parameter for parameter in map(stored_parameter, tensors) if parameter is not None]
        config = stored[0].stored.config if stored else Config()
        meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))
        self.ranks = list(dict.fromkeys(parameter.stored.shard.ranks for parameter in stored))
        if not stored and not meshes:
            replicas = (layer for layer in _layers_of(model) if isinstance(layer, DistributedDataParallel))
            groups = (layer.process_group for layer in replicas)
            self.ranks = [tensor_ranks(config, group) for group in groups if group is not None]
        self.is_first = all(ranks.rank == 0 for ranks in self.ranks)
        for mesh in meshes:
            self.is_first = self.is_first and not any(mesh.get_coordinate() or ())
            self.ranks += [tensor_ranks(config, group) for group in mesh.get_all_groups()]


class _Failure(NamedTuple):
    """What failed somewhere, in words, and whether that is damage to a checkpoint."""

    message: str
    is_damage: bool


def all_ranks(*models: torch.nn.Module) -> Ranks:
    """Return all ranks of torch.distributed; without it, this process alone. They wait for each other for as long as
    those do that train the first of these models that is stored."""
    parameters = (parameter for model in models for parameter in model.parameters())
    stored = (tensor for parameter in parameters for tensor in stored_in(parameter))
    first = next(stored, None)
    return Ranks.of(Config() if first is None else Config(collective_timeout=first.stored.config.collective_timeout))


@contextmanager
def together(what: str, *groups: Ranks) -> Iterator[None]:
    """A block that all of some ranks do, each by itself; each process passes its own `groups`, in the
    same order. It ends well on all of them, or on none.

    Raises: what the block raises; CheckpointError on a rank where it didn't, but on another. DamagedCheckpointError is
    raised on all ranks, or on none, so that all of them may try another checkpoint.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    failure = None
    if failed is not None:
        where = f" on rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else ""
        message = f"{what} failed{where}: {type(failed).__name__}: {failed}"
        failure = _Failure(message, isinstance(failed, DamagedCheckpointError))
    for ranks in groups:
        failures: list[_Failure] = [failure for failure in ranks.of_all(failure, what) if failure is not None]
        if failures:
            failure = min(failures, key=lambda failure: failure.is_damage)  # what else failed decides
    if failure is None:
        return
    if failed is not None and failure.is_damage == isinstance(failed, DamagedCheckpointError):
        raise failed
    kind = DamagedCheckpointError if failure.is_damage else CheckpointError
    raise kind(failure.message) from failed
