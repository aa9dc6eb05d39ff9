"""What takes the place of a stored parameter in a module, or of a module with stored parameters, is stored like it.

So a model stays offloaded when a library resizes its embeddings, makes a new head, or loads a state dict by assignment.
What is added in a new place, such as the adapters of a fine-tuning library, stays ordinary.
"""

from __future__ import annotations

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from zinf_fx.runtime.local_parameter import stored_parameter
from zinf_fx.runtime.offload import offload_parameters
from zinf_fx.runtime.stored_tensor import StoredTensor


@register_module_parameter_registration_hook
def _parameter_registered(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
    before = module._parameters.get(name)
    if isinstance(before, StoredTensor):
        _store_like(before, name, parameter)


@register_module_module_registration_hook
def _module_registered(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    before = parent._modules.get(name)
    if before is None or module is None or before is module:
        return
    stored = {own: p for own, p in before._parameters.items() if isinstance(p, StoredTensor)}
    for own in stored.keys() & module._parameters.keys():
        _store_like(stored[own], f"{name}.{own}", module._parameters[own])


def _store_like(before: StoredTensor, name: str, parameter: torch.nn.Parameter | None) -> None:
    """Move an ordinary parameter, if it is one that can be stored now, to where `before` is."""
    if type(parameter) is not torch.nn.Parameter or stored_parameter(parameter) is not None:
        return
    storage = before.storage
    if storage.tiers is None or storage.part_of:  # made for planning only, or divided by tensor parallelism
        return
    if not (is_lazy(parameter) or parameter.is_meta or parameter.layout != torch.strided):
        offload_parameters({name: parameter}, storage.config)
