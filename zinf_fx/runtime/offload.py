"""Parameters leave for their tier: of a model that exists, or of one that is being built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zinf_fx.config import Config
from zinf_fx.errors import OptimizerError, StoredTensorError
from zinf_fx.runtime.auto_placement import choose
from zinf_fx.runtime.stored_tensor import StoredTensor, as_parameter, check_device, store_value
from zinf_fx.runtime.tiers import Tiers

# An optimizer class with this attribute set knows how to step over stored parameters.
STREAMS_STORED_PARAMETERS = "streams_stored_parameters"


def offload(model: torch.nn.Module, config: Config | None = None, **fields: object) -> torch.nn.Module:
    """Move the parameters of `model` to their tier, in place, and return the model.

    Every parameter stays the same object, so optimizers and tied weights go on working. Buffers stay where they are.
    Gradients that exist move too.

    Raises: ConfigError for bad options; StoreError when the store can't hold the parameters; StoredTensorError for a
    parameter that can't be stored. Nothing was changed then, or the parameters before the failing one are stored.
    """
    config = Config.of(config, fields)
    parameters = [(name, p) for name, p in model.named_parameters() if not isinstance(p, StoredTensor)]
    config = decided(config, [p for _, p in parameters])
    for name, parameter in parameters:
        check_storable(parameter, f"parameter '{name}'")
    tiers = Tiers.of(config)
    for _, parameter in parameters:
        offload_parameter(parameter, tiers, config)
    tiers.drain()
    return model


@contextmanager
def offloading(config: Config | None = None, **fields: object) -> Iterator[None]:
    """Partitioned construction: parameters of models built in this block leave as each submodule is built.

    A submodule's parameters leave when its parent takes it over, after its own initialisation; what is left leaves at
    the end of the block. So the model is never whole in memory, and its initial values are those of an ordinary
    construction with the same seed. Parameters on the meta device stay there.
    """
    config = decided(Config.of(config, fields), None)
    tiers = Tiers.of(config)
    built: list[torch.nn.Parameter] = []

    def note(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            built.append(parameter)

    def leave(parent: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
        if submodule is None:
            return
        for parameter in submodule.parameters():
            store(parameter)
        built[:] = [p for p in built if not isinstance(p, StoredTensor)]

    def store(parameter: torch.nn.Parameter) -> None:
        if isinstance(parameter, StoredTensor) or parameter.is_meta:
            return
        check_storable(parameter, f"a parameter of shape {tuple(parameter.shape)}")
        offload_parameter(parameter, tiers, config)

    handles = [register_module_parameter_registration_hook(note), register_module_module_registration_hook(leave)]
    try:
        yield
        for parameter in built:
            store(parameter)
        tiers.drain()
    finally:
        for handle in handles:
            handle.remove()


def offload_parameter(parameter: torch.nn.Parameter, tiers: Tiers, config: Config) -> None:
    """Move one ordinary parameter (and its gradient) to its tier, keeping the object's identity."""
    stored = store_value(parameter, tiers, config.placement.parameters, config)
    stored.requires_grad_(parameter.requires_grad)
    if parameter.grad is not None:
        stored.grad = store_value(parameter.grad, tiers, config.placement.gradients, config)
    as_parameter(stored)
    replace_in_place(parameter, stored)


def replace_in_place(parameter: torch.Tensor, stored: StoredTensor) -> None:
    """Give the object `parameter` the implementation, class and attributes of `stored`.

    This is what `torch.utils.swap_tensors` does, less its refusal of tensors to which weak references exist: Dynamo's
    guards hold some, and they are what makes it compile again for the parameter's new type.
    """
    torch._C._swap_tensor_impl(parameter, stored)
    parameter.__class__ = StoredTensor
    parameter.__dict__.update(stored.__dict__)


def check_storable(parameter: torch.Tensor, what: str) -> None:
    """Raises: StoredTensorError for a parameter that can't be moved to a tier."""
    if parameter.is_meta:
        raise StoredTensorError(f"{what} is on the meta device and has no values: materialise it first (to_empty)")
    check_device(parameter.device, what)
    if parameter.layout != torch.strided:
        raise StoredTensorError(f"{what} has layout {parameter.layout}: only strided tensors can be stored")
    if type(parameter) is not torch.nn.Parameter:
        raise StoredTensorError(f"{what} is a {type(parameter).__name__}: only plain nn.Parameter can be stored")
    if parameter._backward_hooks:
        raise StoredTensorError(f"{what} has hooks that would be lost: register them after offloading")


def decided(config: Config, parameters: list[torch.Tensor] | None) -> Config:
    """`config` with its placement decided from the parameters' sizes (all of them; None: not yet known)."""
    if config.placement != "auto":
        return config
    return Config.of(config, {"placement": choose(config, parameters)})


@register_optimizer_step_pre_hook
def _refuse_unaware_optimizers(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """A plain optimizer would see no gradients, or gather every state: it must not train nothing in silence."""
    if getattr(optimizer, STREAMS_STORED_PARAMETERS, False):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, StoredTensor):
                name = type(optimizer).__name__
                raise OptimizerError(
                    f"torch.optim.{name} can't step over stored parameters (found one of shape "
                    f"{tuple(parameter.shape)}): use zinf_fx.optim.{name}, which streams their states"
                )
