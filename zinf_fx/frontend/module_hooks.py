"""Hooks of PyTorch's on what is registered in modules that have stored parameters.

What takes the place of a stored parameter in a module, or of a module with stored parameters, is stored like it. So a
model stays offloaded when a library resizes its embeddings, makes a new head, or loads a state dict by assignment.
What is added in a new place, such as the adapters of a fine-tuning library, stays ordinary.

Who wraps a stored model in DistributedDataParallel is told what that costs, before any memory is held. Its `no_sync`
holds for the stored parameters, too: accelerate and transformers accumulate gradients by it.

[Note: tied names]
`load_state_dict(assign=True)` makes a parameter for each name. Those of tied weights are in the same memory then, where
plain PyTorch updates both; stored, each would have bytes of its own. So where one stored parameter had several names,
these get one parameter again for what is in one memory. Names that are given different tensors together, as by a state
dict, are parted, as in plain PyTorch, and a warning says so. A program that gave one of them a tensor by itself knows
that it parted them: the memory of that tensor is gone, or a parameter was written to since.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple, TypeGuard

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from zinf_fx.config import Config
from zinf_fx.cycles import collect_given_up_captures
from zinf_fx.frontend.offload import offload_parameters
from zinf_fx.frontend.parameters import warn_of_staying
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import in_words


class _Successor(NamedTuple):
    """What took the place of a stored parameter under one of its names.

    Attributes:
        module, name: where it is.
        memory: what its elements were in when it came.
        writes: how often it, and what it took the place of, had been written to then.
    """

    module: weakref.ref[torch.nn.Module]
    name: str
    storage: weakref.ref[TensorStorage]
    memory: _Memory
    writes: int

    def came_with(self, before: StoredTensor) -> bool:
        """Whether what takes the place of `before` under another name may be from the same state dict."""
        parameter = self.parameter
        return parameter is not None and self.memory.holder() is not None and self.writes == _writes(before, parameter)

    @property
    def parameter(self) -> StoredTensor | None:
        """The parameter, if it is still there."""
        module, storage = self.module(), self.storage()
        present = None if module is None or storage is None else module._parameters.get(self.name)
        return present if isinstance(present, StoredTensor) and present.stored is storage else None


class _Memory(NamedTuple):
    """The elements of a tensor, and how often they were written to."""

    holder: weakref.ref[object]
    layout: Hashable

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        if isinstance(tensor, StoredTensor):
            return cls(weakref.ref(tensor.stored), (tuple(tensor.shape), tensor.views))
        writes = None if tensor.is_inference() else tensor._version
        layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), writes)
        return cls(weakref.ref(tensor.untyped_storage()), layout)

    def is_that_of(self, tensor: torch.Tensor) -> bool:
        holder = self.holder()
        memory = _Memory.of(tensor)
        return holder is not None and holder is memory.holder() and self.layout == memory.layout


def _writes(*parameters: StoredTensor) -> int:
    return sum(parameter.stored.token._version for parameter in parameters)


# By the storage of a stored parameter, what took its place under the first of its names, and under others.
_SUCCESSORS: weakref.WeakKeyDictionary[TensorStorage, list[_Successor]] = weakref.WeakKeyDictionary()


@register_module_parameter_registration_hook  # pyright: ignore[reportArgumentType]  (hooks may return a parameter)
def _parameter_registered(
    module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
) -> StoredTensor | None:
    """Returns what is to be registered in the place of `parameter`, if anything: see [Note: tied names]."""
    before = module._parameters.get(name)
    if not isinstance(before, StoredTensor) or parameter is before:
        return None
    if not _is_strided(parameter):
        _store_like({name: before}, {name: parameter})
        return None
    if (tied := _tied_with(before, parameter, f"'{name}' of {type(module).__name__}")) is not None:
        return tied
    memory = _Memory.of(parameter)
    _store_like({name: before}, {name: parameter})
    if isinstance(parameter, StoredTensor):
        present = [place for place in _SUCCESSORS.get(before.stored, ()) if place.parameter is not None]
        own = _Successor(weakref.ref(module), name, weakref.ref(parameter.stored), memory, _writes(before, parameter))
        _SUCCESSORS[before.stored] = [*(place for place in present if place[:2] != own[:2]), own]
    return None


def _is_strided(parameter: torch.nn.Parameter | None) -> TypeGuard[torch.nn.Parameter]:
    """Whether this is a parameter, stored or ordinary, with elements in a memory."""
    if not isinstance(parameter, StoredTensor) and type(parameter) is not torch.nn.Parameter:
        return False
    return not parameter.is_meta and parameter.layout == torch.strided and parameter.numel() > 0


def _tied_with(before: StoredTensor, parameter: torch.nn.Parameter, what: str) -> StoredTensor | None:
    """The parameter that took the place of `before` under another name, if `parameter` is in the same memory."""
    successors = ((place, place.parameter) for place in _SUCCESSORS.get(before.stored, ()))
    present = [(place, successor) for place, successor in successors if successor is not None]
    if not present or any(successor is parameter for _, successor in present):
        return None
    same = (
        number
        for number, (place, successor) in enumerate(present)
        if place.memory.is_that_of(parameter) and successor.requires_grad == parameter.requires_grad
    )
    ranks = before.stored.shard.ranks
    number = ranks.of_first(next(same, None), f"whether {what} is tied")
    if number is not None:
        return present[number][1]
    separated = next((place for place, _ in present if place.came_with(before)), None)
    if separated is None:
        return None
    warnings.warn(
        f"{what} and '{separated.name}' of {type(separated.module()).__name__} were one parameter, and are two from "
        "now on, as in plain PyTorch: they were given different tensors, as files have them that keep no ties. To tie "
        "them again, assign the one parameter to both modules, as model.tie_weights() of transformers does",
        stacklevel=3,
    )
    return None


@register_module_module_registration_hook
def _parametrized(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """A parametrization is about to swap the implementation of its parameter."""
    if isinstance(parent, ParametrizationList):
        collect_given_up_captures()


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
    """Yield what `named_parameters` does, tied parameters under each name. A library's module may do more when it is
    asked for those than it can do while it is being replaced (PEFT's of attention puts its base's weights back)."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{prefix}.{name}", parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _parameters_in(child, f"{prefix}.{name}")


def _store_like(before: Mapping[str, StoredTensor], now: Mapping[str, torch.nn.Parameter | None]) -> None:
    """Move the ordinary parameters among those of `now`, if they are such that can be stored now, to where those of
    `before` with their names are. Say which of them stay in memory, such as quantised ones."""
    warn_of_staying({name: parameter for name, parameter in now.items() if name in before})
    together: dict[Config, dict[str, torch.nn.Parameter]] = {}
    for name, parameter in now.items():  # in this order, which all ranks have
        if name not in before:
            continue
        storage = before[name].stored
        if type(parameter) is not torch.nn.Parameter or stored_parameter(parameter) is not None:
            continue
        if (
            not storage.bytes.allocation.is_reserved or storage.shard.part_of
        ):  # a plan's, or divided by tensor parallelism
            continue
        if not (is_lazy(parameter) or parameter.is_meta or parameter.layout != torch.strided):
            together.setdefault(storage.config, {})[name] = parameter
    for config, parameters in together.items():
        whole = {id(parameter) for name, parameter in parameters.items() if before[name].quantised is None}
        offload_parameters(parameters, config, whole)


@register_module_module_registration_hook
def _wrapped(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    if name != "module" or module is None or not isinstance(parent, DistributedDataParallel):
        return
    trained = [
        stored
        for own, parameter in module.named_parameters()
        if parameter.requires_grad
        and own not in parent.parameters_to_ignore
        and (stored := stored_parameter(parameter)) is not None
    ]
    for stored in trained:
        stored.stored.shard.wrapper = weakref.ref(parent)
    if trained:
        nbytes = in_words(sum(stored.numel() * stored.dtype.itemsize for stored in trained))
        warnings.warn(
            f"DistributedDataParallel wraps {len(trained)} stored parameters, and holds {nbytes} of memory for their "
            "gradients, which zinf_fx reduces itself: train the model without the wrapper. With accelerate, wrap "
            "nothing by accelerator.prepare_model(model, evaluation_mode=True); with transformers' Trainer, set "
            "trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True) before "
            "train()",
            stacklevel=3,
        )
