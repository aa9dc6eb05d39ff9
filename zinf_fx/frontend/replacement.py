"""What takes the place of a stored parameter in a module, or of a module with stored parameters, is stored like it.

So a model stays offloaded when a library resizes its embeddings, makes a new head, or loads a state dict by assignment.
What is added in a new place, such as the adapters of a fine-tuning library, stays ordinary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from zinf_fx.config import Config
from zinf_fx.frontend.offload import offload_parameters
from zinf_fx.frontend.staying import note_staying
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


@register_module_parameter_registration_hook
def _parameter_registered(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
    before = module._parameters.get(name)
    if isinstance(before, StoredTensor):
        _store_like({name: before}, {name: parameter})


@register_module_module_registration_hook
def _module_registered(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    before = parent._modules.get(name)
    if before is None or module is None or before is module:
        return
    stored = {own: p for own, p in _parameters_in(before, name) if isinstance(p, StoredTensor)}
    if stored:
        once = {id(parameter): (own, parameter) for own, parameter in reversed([*_parameters_in(module, name)])}
        _store_like(stored, dict(reversed(once.values())))


def _parameters_in(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """As `named_parameters`, tied ones under each name. A library's module may do more when it is asked for those than
    it can do while it is being replaced (PEFT's of attention puts its base's weights back)."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{prefix}.{name}", parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _parameters_in(child, f"{prefix}.{name}")


def _store_like(before: Mapping[str, StoredTensor], now: Mapping[str, torch.nn.Parameter | None]) -> None:
    """Move the ordinary parameters among those of `now`, if they are such that can be stored now, to where those of
    `before` with their names are. Say which of them stay in memory, such as quantised ones."""
    note_staying({name: parameter for name, parameter in now.items() if name in before})
    together: dict[Config, dict[str, torch.nn.Parameter]] = {}
    for name, parameter in now.items():  # in this order, which all ranks have
        if name not in before:
            continue
        storage = before[name].storage
        if type(parameter) is not torch.nn.Parameter or stored_parameter(parameter) is not None:
            continue
        if storage.tiers is None or storage.share.part_of:  # made for planning only, or divided by tensor parallelism
            continue
        if not (is_lazy(parameter) or parameter.is_meta or parameter.layout != torch.strided):
            together.setdefault(storage.config, {})[name] = parameter
    for config, parameters in together.items():
        whole = {id(parameter) for name, parameter in parameters.items() if before[name].quantised is None}
        offload_parameters(parameters, config, whole)
