"""A base: frozen parameters that are read from files where they are, by as many jobs as like."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from zinf_fx.arguments import check_model, check_path
from zinf_fx.checkpoint.entries import listed
from zinf_fx.checkpoint.models import by_plain_name, together, unwrapped
from zinf_fx.checkpoint.quantised_weights import Published
from zinf_fx.checkpoint.safetensors_format import TensorInFile, TensorInfo, WeightFiles
from zinf_fx.checkpoint.weights import check_format, fill, located, quantised_as
from zinf_fx.config import Config
from zinf_fx.errors import CheckpointError, ConfigError
from zinf_fx.frontend.offload import decided, replace_in_place
from zinf_fx.frontend.parameters import configs_of, is_ordinary
from zinf_fx.interrupts import held_back
from zinf_fx.plan.sharding import Owners, shards_of
from zinf_fx.runtime.disk.read_only import FileExtent, ReadOnlyFile
from zinf_fx.runtime.memory.device import device_of
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor, as_parameter
from zinf_fx.runtime.tensor.tiers import Tiers

_WITHOUT_VALUE = " without a value: accelerate.init_empty_weights(include_buffers=False) leaves those in memory"


@held_back
def attach_base(
    model: torch.nn.Module, directory: str | os.PathLike[str], config: Config | None = None, **fields: object
) -> torch.nn.Module:
    """Let the parameters of `model` be those in `directory`, frozen and read from there, and return the model.

    `directory` is a checkpoint that `save_checkpoint` wrote, whose tensors are as they were stored (of
    `frozen_dtype="nf4"`, 4 bits), or has safetensors files, such as a downloaded model. Nothing of it is copied or
    written, so any number of jobs may use one at a time, and none can damage it. What begins at a multiple of 4096
    bytes, as everything in a checkpoint does, is read directly; else through the page cache, which is slower.

    Weights that are published as codes and scales (FP8, MXFP4: see `checkpoint.published`) are the exception: rows of
    codes go to this model's store, each with its scales, tables of embeddings too. To share them, save a model that
    `load_safetensors` gave them once, and attach that.

    Parameters may be on the meta device, and their values are not looked at. Persistent buffers, which are in a state
    dict, take the values of the files, and stay in memory; so do others on the meta device. Adapters are added
    afterwards. Of many ranks, each reads its part.

    Raises: CheckpointError where names, shapes or dtypes differ; ConfigError for a placement of parameters that is not
    "nvme", for a `frozen_dtype` that the files don't have, and for parameters that are divided; StoreError for files
    that can't be read. On every rank, what fails on one fails; the model is as before then.
    """
    check_model(model, "attach_base")
    check_path(directory, "attach_base")
    model, path = unwrapped(model), Path(directory).absolute()
    parameters = by_plain_name(model, model.named_parameters(remove_duplicate=False))
    config = decided(
        Config.of(config, {"placement": "nvme", **fields}), [p for p in parameters.values() if is_ordinary(p)]
    )
    configs = configs_of(config, parameters)
    if elsewhere := {config.own_placement.parameters for config in configs.values()} - {"nvme"}:
        there = ", ".join(map(repr, sorted(elsewhere)))
        raise ConfigError(
            f"attach_base() reads parameters from disk, and the placement has them on {there}: "
            "leave it out, or load the files with load_safetensors() or load_checkpoint()"
        )
    buffers = _buffers_in_files(model)
    with together("attaching a base", Ranks.of(config)), torch.inference_mode(False):
        in_files = located(model, path, parameters | buffers)
        _check_fit(model, parameters, buffers, in_files, path)
        _check_formats(config, parameters, in_files, path)
        owners = Owners(Ranks.of(config).shards)
        twins = _twins(parameters, in_files, configs, owners)
        values = _values(buffers, in_files)
    _take_over(model, parameters, twins, values)
    return model


def _buffers_in_files(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By plain name, the buffers that take their values from files: those of the state dict, and those without any."""
    persistent = {id(value) for value in model.state_dict(keep_vars=True).values()}
    buffers = by_plain_name(model, model.named_buffers(remove_duplicate=False))
    return {name: buffer for name, buffer in buffers.items() if id(buffer) in persistent or buffer.is_meta}


@torch.no_grad()
def _take_over(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter],
    twins: dict[int, StoredTensor],
    values: Mapping[int, torch.Tensor],
) -> None:
    """Give the parameters the implementations of `twins`, and the buffers their values, both by ids."""
    for parameter in {id(parameter): parameter for parameter in parameters.values()}.values():
        parameter.grad = None
        parameter.requires_grad_(False)
        replace_in_place(parameter, twins.pop(id(parameter)))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or (value := values.get(id(buffer))) is None:
                continue
            if buffer.is_meta or _is_expanded(buffer):
                module._buffers[name] = value.to("cpu" if buffer.is_meta else buffer.device)
                continue
            with torch.inference_mode(buffer.is_inference()):
                buffer.copy_(value)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements lie in one place, so that they can't take values of their own there."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _twins(
    parameters: Mapping[str, torch.nn.Parameter],
    in_files: Mapping[str, TensorInFile | Published],
    configs: Mapping[str, Config],
    owners: Owners,
) -> dict[int, StoredTensor]:
    """By the id of each parameter, what takes its place."""
    files: dict[Path, ReadOnlyFile] = {}
    twins: dict[int, StoredTensor] = {}
    with WeightFiles() as opened:
        for name, parameter in parameters.items():
            place = in_files.get(name)
            if id(parameter) in twins or place is None:
                continue
            if isinstance(place, Published):
                twins[id(parameter)] = _packed(name, parameter, place, configs[name], owners, opened)
            else:
                twins[id(parameter)] = _twin(name, parameter, place, configs[name], files)
    packed = [twin.stored for twin in twins.values() if not twin.stored.bytes.allocation.is_read_only]
    for tiers in {storage.tiers for storage in packed}:
        tiers.drain()
    for storage in packed:
        storage.bytes.allocation.seal()
    return twins


def _packed(
    name: str, parameter: torch.Tensor, published: Published, config: Config, owners: Owners, files: WeightFiles
) -> StoredTensor:
    """The stored parameter that has the codes and scales of a published weight, in the store. Raises: StoreError."""
    tiers, ranks, quantised = Tiers.of(config), Ranks.of(config), quantised_as(published, parameter)
    shape, dtype = torch.Size(quantised.bytes_shape(parameter.shape)), torch.uint8
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    shards = shards_of(shape, dtype, ranks.shards, config, owners.next(shape.numel()))
    shard = LocalShard(shards, ranks, config.stage == 3)
    storage = TensorStorage(config, shard, Allocation(tiers, "nvme", [shard.held], dtype, device_of(device)))
    storage.label = f"parameter '{name}'"
    twin = as_parameter(StoredTensor.of(storage, parameter.shape, device, quantised=quantised))
    fill(twin, files, published)
    return twin


def _twin(
    name: str,
    parameter: torch.Tensor,
    place: TensorInFile,
    config: Config,
    files: dict[Path, ReadOnlyFile],
) -> StoredTensor:
    """The stored parameter that has the bytes at `place`. Raises: StoreError, ConfigError."""
    tiers = Tiers.of(config)
    ranks, partitioned = Ranks.of(config), config.stage == 3
    numel, dtype = place.kind.numel, place.kind.dtype
    shards = shards_of(place.shape, dtype, ranks.shards, config)
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    shard = LocalShard(shards, ranks, partitioned)
    first, count = 0, numel
    if shard.partitioned:
        if not shards.is_one_part:
            raise ConfigError(
                f"parameter '{name}' would be one rank's alone, or have several parts on each, and one part of it can "
                "be read in place: give tile=None and partition='shards'"
            )
        own = shards.segments[0].of_rank(ranks.shard)
        first, count = own.start, len(own)
    if place.path not in files:
        files[place.path] = tiers.store.open_read_only(place.path)
    extent = FileExtent(files[place.path], place.offset + first * dtype.itemsize, count * dtype.itemsize)
    allocation = Allocation(tiers, "nvme", [shard.held], dtype, device_of(device), extent)
    storage = TensorStorage(config, shard, allocation)
    storage.shard.agreed = True
    storage.label = f"parameter '{name}'"
    return as_parameter(StoredTensor.of(storage, parameter.shape, device, quantised=place.quantised))


def _values(
    buffers: Mapping[str, torch.Tensor], in_files: Mapping[str, TensorInFile | Published]
) -> dict[int, torch.Tensor]:
    """By the ids of buffers, of which some may be one object with several names, their values."""
    read: dict[int, torch.Tensor] = {}
    with WeightFiles() as files:
        for name, buffer in buffers.items():
            if isinstance(place := in_files.get(name), TensorInFile):
                content = files.read(place, 0, place.kind.nbytes)
                read[id(buffer)] = content.view(place.kind.dtype).view(place.shape)
    return read


def _check_fit(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    in_files: Mapping[str, TensorInFile | Published],
    path: Path,
) -> None:
    """Raises: CheckpointError unless all of these parameters and buffers are in the files as the model has them."""
    wrong = []
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    lacking = [shared_names[0] for shared_names in names.values() if not any(name in in_files for name in shared_names)]
    wrong += [f"it lacks '{name}'" for name in lacking]
    known = {id(buffer) for name, buffer in buffers.items() if name in in_files}
    wrong += [
        f"it lacks '{name}', a buffer{_WITHOUT_VALUE if buffer.is_meta else ''}"
        for name, buffer in buffers.items()
        if id(buffer) not in known
    ]
    for name, parameter in parameters.items():
        if isinstance(parameter, StoredTensor):
            wrong.append(f"'{name}' of the model is stored already")
        elif isinstance(parameter, DTensor):
            wrong.append(f"'{name}' of the model is a DTensor, and only whole parameters are read in place")
        elif name in in_files and (mine := _form(parameter, in_files[name])) != (theirs := _form_of(in_files[name])):
            wrong.append(f"'{name}' is {theirs}, and {mine} in the model")
    for name, buffer in buffers.items():
        if isinstance(buffer, DTensor):
            wrong.append(f"'{name}' of the model is a DTensor, and only whole buffers are read")
        elif name in in_files and (mine := str(TensorInfo(buffer.dtype, tuple(buffer.shape)))) != (
            theirs := str(in_files[name])
        ):
            wrong.append(f"'{name}' is {theirs}, and {mine} in the model")
    if wrong:
        check_format(path)
        raise CheckpointError(
            f"{path} is no base of {type(model).__name__}: {listed(wrong)}. Nothing was changed: "
            "build the model as it was saved, in its dtype (model.to(torch.bfloat16), and a buffer of another one by "
            "module.name = module.name.float()), before adapters are added"
        )


def _check_formats(
    config: Config, parameters: Mapping[str, torch.Tensor], in_files: Mapping[str, TensorInFile | Published], path: Path
) -> None:
    """Raises: ConfigError for a `frozen_dtype` that is not the format of what is quantised in the files."""
    by_name = {
        name: form for name in parameters if name in in_files and (form := _format_of(in_files[name])) is not None
    }
    agree = bool(by_name) and all(config.frozen_dtype_of(name) == form for name, form in by_name.items())
    if config.frozen_dtype is not None and not agree:
        has = ", ".join(sorted({*by_name.values()})) or "not quantised"
        raise ConfigError(
            f"attach_base() reads what is in {path} as it is, which is {has}, and frozen_dtype is "
            f"'{config.frozen_dtype}': leave it out, or load the files into a model that is offloaded with it, and "
            "save that as a base"
        )


def _format_of(place: TensorInFile | Published) -> str | None:
    """Return the format of what is quantised in the files."""
    if isinstance(place, Published):
        return place.format
    return None if place.quantised is None else place.quantised.format


def _form(parameter: torch.Tensor, place: TensorInFile | Published) -> str:
    """What a parameter would be in the files."""
    shape = list(parameter.shape)
    if isinstance(place, Published):
        return f"{place.format}{shape}"
    if place.quantised is not None and len(shape) >= 2:
        shape = list(place.quantised.bytes_shape(shape))
    return f"{str(parameter.dtype).removeprefix('torch.')}{shape}"


def _form_of(place: TensorInFile | Published) -> str:
    if isinstance(place, Published):
        return str(place)
    dtype = place.kind.dtype if place.quantised is None else place.quantised.dtype
    return f"{str(dtype).removeprefix('torch.')}{list(place.shape)}"
