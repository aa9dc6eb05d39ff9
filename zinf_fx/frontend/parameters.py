"""The parameters of a model: which of them offloading moves, with which options, and in which format."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zinf_fx.checkpoint.models import by_plain_name
from zinf_fx.compat import bitsandbytes
from zinf_fx.config import Config, FrozenDtype, StoreOptions
from zinf_fx.errors import ConfigError, StoredTensorError
from zinf_fx.placement import Placement, PlacementRules, in_common
from zinf_fx.plan.sharding import Shards
from zinf_fx.quantisation import can_be_quantised
from zinf_fx.runtime.memory.device import check_device
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_parameter import (
    LocalParameter,
    distributed_as,
    local_part,
    stored_in,
    stored_parameter,
)
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.quantised import Form
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor, as_parameter, carried, carry
from zinf_fx.runtime.tensor.tensor_parallel import check_distributed
from zinf_fx.sizes import in_words

# A model's options that can't be others for a graph of it. Parameters to come may have another format.
_OF_STATES = tuple(option.name for option in fields(StoreOptions) if option.name != "frozen_dtype")


# Which parameters move.


def is_ordinary(value: object) -> TypeGuard[torch.nn.Parameter]:
    """Whether this is a parameter that offloading would move."""
    return isinstance(value, torch.nn.Parameter) and stored_parameter(value) is None and not stays(value)


def stays(value: object) -> bool:
    """Whether this is a parameter that offloading leaves where it is: a frozen one of a class of its own. Quantised
    parameters are such, whose bytes say nothing without what the class knows about them."""
    if not isinstance(value, torch.nn.Parameter) or isinstance(value, (StoredTensor, DTensor)):
        return False
    return type(value) is not torch.nn.Parameter and not value.requires_grad and not is_lazy(value)


def stored_among(named: Iterable[tuple[str, object]]) -> dict[str, StoredTensor]:
    """By name, what stands for the parameters that are stored: see `stored_parameter`."""
    return {name: stored for name, value in named if (stored := stored_parameter(value)) is not None}


def check_storable(parameter: torch.Tensor, what: str) -> None:
    """Raises: StoredTensorError for a parameter that can't be moved to a tier."""
    if is_lazy(parameter):
        raise StoredTensorError(f"{what} is not initialised yet: run the model once before offloading it")
    if parameter.is_meta:
        raise StoredTensorError(f"{what} is on the meta device and has no values: materialise it first (to_empty)")
    check_device(parameter.device, what)
    if parameter.layout != torch.strided:
        raise StoredTensorError(f"{what} has layout {parameter.layout}: only strided tensors can be stored")
    if isinstance(parameter, DTensor):
        check_distributed(parameter, what)
    elif type(parameter) is not torch.nn.Parameter and not bitsandbytes.has_codes(parameter):
        raise StoredTensorError(
            f"{what} is a {type(parameter).__name__} that is trained: only plain nn.Parameter can be stored. Freeze it "
            "with requires_grad_(False), and it stays on its device"
        )
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise StoredTensorError(
            f"{what} has a gradient of layout {parameter.grad.layout}: only strided ones can be stored; clear it first"
        )


def check_disjoint(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises: StoredTensorError for two parameters in the same memory, which would part."""
    by_address: dict[int, str] = {}
    for name, parameter in parameters.items():
        elements = local_part(parameter)
        first_name = by_address.setdefault(elements.data_ptr(), name) if elements.numel() else name
        if first_name != name:
            raise StoredTensorError(
                f"parameters '{first_name}' and '{name}' are different parameters in the same memory, and would no "
                "longer be tied: tie them by assigning the one parameter to both modules"
            )


def warn_of_staying(parameters: Mapping[str, Any]) -> None:
    """Warn of parameters that stay in memory, if any do. Python shows a warning with the same text once."""
    staying = {name: value for name, value in parameters.items() if stays(value) and not stored_in(value)}
    if not staying:
        return
    (name, parameter), *_ = staying.items()
    warnings.warn(
        f"{len(staying)} frozen parameter(s), {in_words(sum(map(bytes_in_memory, staying.values())))}, stay on "
        f"their device, such as '{name}', a {type(parameter).__name__}: only plain nn.Parameter can be stored, and "
        "what offload() knows: traceable wrapper subclasses, and codes of bitsandbytes, which its layers have once "
        "they were moved to a device. Plans count them in device_memory. To store them, offload the model before it "
        "is quantised",
        stacklevel=3,
    )


def warn_of_layouts(parameters: Mapping[str, torch.Tensor]) -> None:
    """Warn of parameters that will be contiguous, and are not, if any. Elements that are there once for several are not
    meant: kernels read them in one order in any case."""
    names = [name for name, value in parameters.items() if not is_lazy(value) and _is_reordered(local_part(value))]
    if names:
        warnings.warn(
            f"{len(names)} parameter(s), such as '{names[0]}', are not contiguous (transposed, or channels_last, say), "
            "and are stored contiguous: convolutions and products may take other kernels for that, and results differ "
            "from plain PyTorch's in the last bits. To compare both, make them contiguous before",
            stacklevel=3,
        )


def _is_reordered(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and 0 not in tensor.stride()
    return is_dense and not tensor.is_contiguous()


def bytes_in_memory(tensor: torch.Tensor) -> int:
    """Bytes that the elements take: of a wrapper subclass, those of the tensors in it; of what was expanded, once."""
    if is_traceable_wrapper_subclass(tensor):
        inner, _ = tensor.__tensor_flatten__()
        return sum(bytes_in_memory(getattr(tensor, name)) for name in inner)
    if tensor.layout != torch.strided:
        return tensor.nbytes
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def attributes_to_carry(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes of a parameter, ordinary or stored, that say what its bytes mean to a library."""
    return bitsandbytes.attributes_of(parameter) if bitsandbytes.has_codes(parameter) else carried(parameter)


# With which options.


def placed(config: Config, placement: Placement | PlacementRules | None) -> Config:
    """`config`, with `placement` in the place of its own, if there is one."""
    return config if placement is None else Config.of(config, {"placement": placement})


def configs_of(config: Config, parameters: Mapping[str, torch.Tensor]) -> dict[str, Config]:
    """By name, the options of each parameter, with the placement and the format that are for it; equal ones are one
    object.

    Raises: ConfigError for a parameter that the rules say nothing of, or that many ranks can't have there.
    """
    if not isinstance(config.placement, PlacementRules) and not isinstance(config.frozen_dtype, tuple):
        return dict.fromkeys(parameters, config)
    made: dict[tuple[Placement | Literal["auto"], FrozenDtype | None], Config] = {}
    configs = {}
    for name, parameter in parameters.items():
        placement = "auto" if config.placement == "auto" else config.placement.of(name, parameter)
        own = placement, config.frozen_dtype_of(name)
        if own not in made:
            made[own] = Config.of(config, {"placement": placement, "frozen_dtype": own[1]})
            check_stage(made[own])
        configs[name] = made[own]
    return configs


def check_stage(config: Config) -> None:
    """Raises: ConfigError for parameters on NVMe that every rank is to have all of."""
    placement = config.placement
    if placement == "auto" or placement.stage == 3 or Ranks.of(config).size == 1:
        return
    if isinstance(placement, Placement) and placement.parameters == "nvme":
        raise ConfigError(
            f"stage {placement.stage} keeps every parameter on every rank, and the placement has parameters on nvme: "
            "stage 3 partitions them (or place them on 'host' or 'device')"
        )


def check_rules(config: Config, parameters: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Check that patterns of names are for the model that has these parameters, and no others. Raises: ConfigError."""
    tied = by_plain_name(model, model.named_parameters(remove_duplicate=False))
    config.check_names(parameters, tied)


def options_given(config: Config | None, options: Mapping[str, object]) -> set[str]:
    """The names of the options that a caller chose: those given by name, and a `config`'s that differ from the
    defaults."""
    default, own = Config(), Config.of(config, {})
    names = (option.name for option in fields(Config))
    return {*options, *(name for name in names if getattr(own, name) != getattr(default, name))}


def options_of_states(stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """The options that stored parameters, by name, were made with, and that can't be others for a graph of theirs."""
    # Shards of what many ranks train consist of tiles.
    return (*_OF_STATES, "tile") if next(iter(stored.values())).stored.shard.ranks.shards > 1 else _OF_STATES


def check_not_contradicted(
    requested: Config, given: Collection[str], stored: Mapping[str, StoredTensor], hint: str
) -> None:
    """Raises: ConfigError where a `given` option is another one than that which a stored parameter was offloaded with,
    and `hint` says what to do."""
    for name, parameter in stored.items():
        for option in sorted(given):
            asked, own = getattr(requested, option), getattr(parameter.base.config, option)
            asked = requested.frozen_dtype_of(name) if option == "frozen_dtype" else asked
            differs = _is_placed_otherwise(requested, name, parameter) if option == "placement" else asked != own
            if differs and asked != "auto":
                raise ConfigError(
                    f"{option}={asked} was asked for, but parameter '{name}' was offloaded with {own}: {hint}"
                )


def _is_placed_otherwise(requested: Config, name: str, stored: StoredTensor) -> bool:
    own, asked = stored.base.config, requested.placement
    if not isinstance(stored, (torch.nn.Parameter, LocalParameter)):  # such as a gradient, which is like its parameter
        return False
    if isinstance(asked, PlacementRules):
        return not asked.may_have_chosen(name, stored, own.own_placement)
    return asked != own.placement


def placement_of_all(
    stored: Mapping[str, StoredTensor], asked: Placement | PlacementRules | None = None
) -> Placement | PlacementRules | None:
    """What places all stored tensors, by name, as they are placed, or as `asked` says; None: there are none."""
    if not stored:
        return asked
    if asked is not None:
        return in_common({name: asked.of(name, tensor) for name, tensor in stored.items()})
    return in_common({name: tensor.base.config.own_placement for name, tensor in stored.items()})


# In which format.


def form_of(parameter: torch.Tensor, config: Config, tables: Collection[int] = ()) -> Form:
    """What is stored of a parameter, or of this rank's part of one. `tables`: ids of those that are looked up by rows,
    and others that stay as they are. Of patterns, the first format is meant, for whoever asks only how many bytes.

    Raises: ConfigError for one that would be quantised, and that tensor parallelism divides.
    """
    name = config.frozen_dtype
    if isinstance(name, tuple):
        name = next((form for _, form in name if form is not None), None)
    if name is None or parameter.requires_grad or id(parameter) in tables or not can_be_quantised(parameter):
        return Form.of(parameter)
    if isinstance(parameter, DTensor):
        raise ConfigError(
            f"frozen_dtype='{name}' and a parameter of shape {tuple(parameter.shape)} that tensor parallelism divides: "
            "such are stored as they are, so leave frozen_dtype out"
        )
    return Form.of(parameter, name)


def kept_in_their_format(config: Config, parameters: Mapping[str, torch.Tensor], tables: Collection[int]) -> set[int]:
    """The ids of parameters that no format is meant for: `tables`, which are looked up by rows, and those, by name, for
    which patterns have none. Raises: ConfigError."""
    if not isinstance(config.frozen_dtype, tuple):
        return {*tables}
    return {*tables, *(id(value) for name, value in parameters.items() if config.frozen_dtype_of(name) is None)}


def warn_of_nothing_quantised(config: Config, parameters: Iterable[torch.Tensor], tables: Collection[int] = ()) -> None:
    """Warn where a format was asked for, and none of a model's parameters is stored in any. `tables`: ids of those that
    stay as they are."""
    formats = config.frozen_dtype if isinstance(config.frozen_dtype, tuple) else [("*", config.frozen_dtype)]
    wanted = [form for _, form in formats if form is not None]
    parameters = list(parameters)
    quantised = (stored.quantised is not None for parameter in parameters for stored in stored_in(parameter))
    if not wanted or not parameters or any(quantised):
        return
    matrices = [value for value in parameters if id(value) not in tables and can_be_quantised(local_part(value))]
    trained = sum(matrix.requires_grad for matrix in matrices)
    if trained:
        why = f"the {trained} matrices that could be train: freeze the base first, as by model.requires_grad_(False)"
    else:
        why = "none is a frozen matrix of floating-point values with rows of at least 64, and no table of embeddings"
    warnings.warn(
        f"frozen_dtype='{wanted[0]}' has no effect: of {len(parameters)} parameters, none is stored in it: {why}",
        stacklevel=3,
    )


# What stands for them where a model is planned without values.


def abstract_parameter(
    parameter: torch.nn.Parameter, what: str, config: Config, tables: Collection[int] = ()
) -> torch.Tensor:
    """The parameter as it would be once it is offloaded by these options, which are its own, but without bytes. One
    that is stored already keeps its placement; one that offloading leaves in memory is itself.

    `what` names it in errors; `tables`: ids of those that are looked up by rows.

    Raises: StoredTensorError for one that can't be stored.
    """
    if stays(parameter):
        return parameter
    stored = stored_parameter(parameter)
    tier = config.own_placement.parameters if stored is None else stored.base.tier
    if stored is not None:
        config = placed(config, stored.base.config.own_placement)
    elif not parameter.is_meta:
        check_storable(parameter, what)
    elif type(parameter) is not torch.nn.Parameter and not isinstance(parameter, DTensor):
        raise StoredTensorError(f"{what} is a {type(parameter).__name__}: only plain nn.Parameter can be stored")
    part = local_part(parameter)
    if stored is not None:
        form = Form(stored.base.shape, stored.base.dtype, stored.quantised)
    else:
        form = form_of(parameter, config, tables)
        form = form if form.quantised is not None else Form.of(part)
    shard = LocalShard(Shards.of(form.numel, 1, config.on_nvme))
    storage = TensorStorage(config, shard, Allocation.unreserved(tier, [form.numel], form.dtype))
    storage.stands_for = None if stored is None else stored.stored
    device = torch.device("cpu") if part.is_meta else part.device
    twin = StoredTensor.of(storage, part.shape, device, quantised=form.quantised)
    if isinstance(parameter, DTensor):
        whole = distributed_as(parameter, twin)
        whole.requires_grad_(parameter.requires_grad)
        LocalParameter.of_whole(whole, twin)
        return as_parameter(whole)
    carry(twin, attributes_to_carry(parameter), of=parameter)
    twin.requires_grad_(parameter.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # which decide where the gradient goes
        setattr(twin, hooks, getattr(parameter, hooks))
    return as_parameter(twin)
