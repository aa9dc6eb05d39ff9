"""Which ranks have what of a DTensor parameter: those of its mesh divide it, the data-parallel ones each part of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError, StoredTensorError, ZinfError
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.local_parameter import local_part

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

T = TypeVar("T")

_WHICH = "which ranks train the model with equal parts of each"
# Names of a mesh's dimension along which ranks hold equal parts, and not other stages of a pipeline, say.
_DATA_PARALLEL = ("dp", "ddp", "fsdp", "data", "data_parallel", "replicate", "shard", "dp_replicate", "dp_shard")
_GIVE = "give those with equal parts of it, such as process_group=mesh['dp'].get_group() of the 2-D mesh"


def check_not_sharded(model: torch.nn.Module) -> None:
    """Raises: StoredTensorError for a model whose parameters FSDP gathers."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise StoredTensorError(
                f"fully_shard() divides the parameters of '{name or 'the model'}', as zinf_fx would: use one of the two"
            )


def check_distributed(parameter: DTensor, what: str) -> None:
    """Raises: StoredTensorError for a DTensor whose local tensor can't be stored."""
    local = local_part(parameter)
    if type(local) is not torch.Tensor:
        raise StoredTensorError(
            f"{what} is a DTensor of {type(local).__name__}: only one of plain tensors can be stored"
        )
    if any(placement.is_partial() for placement in parameter.placements):
        raise StoredTensorError(
            f"{what} is a DTensor with placements {parameter.placements}: redistribute it to Shard or Replicate first"
        )


def with_ranks(config: Config, parameters: Iterable[torch.Tensor]) -> Config:
    """Return `config` with a process group, where it has none and the parameters' mesh says which ranks hold equal
    parts: those along the other dimension of a 2-D mesh that theirs is a part of, if its name is one of data
    parallelism; this one alone, if theirs has all ranks.

    Raises: ConfigError for ranks that hold different parts of a parameter, and where the mesh doesn't say.
    """
    parameters = list(parameters)
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    if meshes and config.process_group is None and config.mesh is None:
        if len(meshes) > 1:
            raise ConfigError(f"parameters are DTensors of several meshes, which don't tell {_WHICH}: {_GIVE}")
        config = Config.of(config, {"process_group": _others(*meshes)})
    check_ranks(config, parameters)
    return config


def check_ranks(config: Config, parameters: Iterable[torch.Tensor]) -> None:
    """Raises: ConfigError where a parameter is divided over ranks that are to share equal parts of it."""
    for mesh in {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}:
        group = config.process_group or dist.group.WORLD
        ranks = dist.get_process_group_ranks(group) if config.mesh is None else config.mesh.mesh.flatten().tolist()
        shared = set(ranks) & set(mesh.mesh.flatten().tolist())
        if shared != {dist.get_rank()}:
            raise ConfigError(
                f"parameters are divided over the ranks of {mesh}, and ranks {sorted(shared)} of these are in the "
                f"process group that is to train the model: {_GIVE}"
            )


def of_first(config: Config, parameters: Iterable[object], value: Any, what: str) -> Any:
    """Return the `value` that the first rank found, of those that share these parameters and those that they are
    divided over: all of them have to act upon it alike."""
    value = Ranks.of(config).of_first(value, what)
    meshes = dict.fromkeys(parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor))
    for group in dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()):
        value = tensor_ranks(config, group).of_first(value, what)
    return value


def found_by_first(config: Config, parameters: Iterable[object], find: Callable[[], T], what: str) -> T:
    """Return what the first rank finds, of those that `of_first` is for. All of them look for it, and raise the first
    one's error if it fails."""
    result: T | ZinfError
    try:
        result = find()
    except ZinfError as error:
        result = error
    result = of_first(config, parameters, result, what)
    if isinstance(result, ZinfError):
        raise result
    return result


def groups_of(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over whose ranks a DTensor is divided, so that each has another part."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
    return tuple(mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


def tensor_ranks(config: Config, group: dist.ProcessGroup) -> Ranks:
    """Return the ranks of a group over which parameters, or activations, are divided. All of them call this."""
    return Ranks.of(Config.of(config, {"process_group": group, "mesh": None, "placement": "auto"}))


def resolved(group: dist.ProcessGroup | GroupName) -> dist.ProcessGroup:
    """Return the group that a functional collective names."""
    return group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)


def _others(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the ranks with the same coordinate in `mesh`, as far as the mesh that it is a part of tells."""
    if mesh.size() == dist.get_world_size():
        return _alone(dist.group.WORLD)
    root = mesh._get_root_mesh()
    outer_dims = [name for name in root.mesh_dim_names or () if name not in (mesh.mesh_dim_names or ())]
    if root.ndim != mesh.ndim + 1 or len(outer_dims) != 1 or outer_dims[0] not in _DATA_PARALLEL:
        raise ConfigError(f"parameters are DTensors of {mesh}, a part of {root}, which doesn't tell {_WHICH}: {_GIVE}")
    return root.get_group(outer_dims[0])


@functools.lru_cache(maxsize=1)
def _alone(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of this rank, as long as `world` is."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
    return group
