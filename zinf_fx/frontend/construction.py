"""Partitioned construction: the parameters of a model leave for their tier as it is built."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar, Unpack

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from zinf_fx.compat import bitsandbytes
from zinf_fx.compat.safetensors import MappedFiles
from zinf_fx.compat.transformers import Converting, loading_in_turn
from zinf_fx.config import Config, Options
from zinf_fx.errors import ConfigError
from zinf_fx.frontend.offload import decided, replace_in_place, reserved_twins, with_value
from zinf_fx.frontend.packing import bring_together
from zinf_fx.frontend.parameters import (
    check_storable,
    form_of,
    stays,
    warn_of_nothing_quantised,
    warn_of_staying,
)
from zinf_fx.interrupts import held_back
from zinf_fx.placement import PlacementRules, check_patterns
from zinf_fx.plan.sharding import Owners
from zinf_fx.quantisation import can_be_quantised, is_table
from zinf_fx.runtime.memory.host import memory_of_file
from zinf_fx.runtime.memory.process import pass_through
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.local_parameter import local_part, stored_parameter
from zinf_fx.runtime.tensor.storage import new_key, writes_of_first
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tensor_parallel import check_ranks
from zinf_fx.runtime.tensor.tiers import Tiers

T = TypeVar("T")

# Bytes of mapped files that may have been read before their memory is given back to the system.
_MAPPED_AT_ONCE = 64 << 20


@contextmanager
def offloading(config: Config | None = None, **options: Unpack[Options]) -> Iterator[None]:
    """Partitioned construction: parameters of models built in this block leave as each submodule is built.

    A module's parameters leave when another module registers one, or a parent takes the module over; what is left
    leaves at the end of the block, where small ones of one kind are brought together. What initialises them later
    writes to the store. So the model is never whole in memory, and its initial values are those of an ordinary
    construction with the same seed. Parameters on the meta device, and lazy ones, stay as they are.

    Of many ranks, all build the same model, in the same order, and get the values of parameters and buffers that the
    first one has: each parameter is broadcast when it leaves, and again by each eager operation in the block that
    writes to it then; buffers at the end.

    In the block, the environment has HF_DEACTIVATE_ASYNC_LOAD=1 unless it has that variable already: with it,
    transformers reads one tensor of a checkpoint after the other, instead of all of them ahead in threads.
    """
    decided_config = decided(Config.of(config, options), None)
    if isinstance(decided_config.placement, PlacementRules):
        raise ConfigError(
            "placement has rules for single parameters, and those of a model that is being built have no names yet: "
            "give a tier for all, or build the model outside of offloading() and call offload() then"
        )
    construction = _Construction(decided_config)
    hooks = [
        register_module_parameter_registration_hook(construction.add_parameter),
        register_module_buffer_registration_hook(construction.add_buffer),
        register_module_module_registration_hook(construction.add_module),
    ]
    on_nvme = decided_config.own_placement.parameters == "nvme"
    try:
        with writes_of_first(), loading_in_turn(), Converting(construction.mapped) if on_nvme else nullcontext():
            yield
        construction.finish()
    finally:
        for hook in hooks:
            hook.remove()


class _Construction:
    """The models that are built in a block of `offloading`.

    Attributes:
        mapped: the memory of checkpoints that values are loaded from.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ranks = Ranks.of(config)
        self._tiers, self._owners = Tiers.of(config), Owners(self._ranks.shards)
        if config.own_placement.parameters == "nvme":
            _ = self._tiers.store  # a directory that can't be used shows before anything is built
        self.mapped = MappedFiles(_MAPPED_AT_ONCE, partial(memory_of_file, config.stores[0]))
        self._names = _Names()
        self._begun_at = new_key()
        self._numbers = itertools.count()
        # Modules are held weakly, and parameters not at all: Module.to() refuses those that somebody holds weakly.
        self._modules: list[weakref.ref[torch.nn.Module]] = []  # the last is the one that registers parameters now
        self._with_buffers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()  # in order
        self._staying: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()  # have such

    def add_parameter(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        """A module registers a parameter, so those of the one before it are complete."""
        if not self._modules or self._modules[-1]() is not module:
            self._store_waiting()
            self._modules.append(weakref.ref(module))
        if parameter is None:
            return
        if bitsandbytes.has_codes(parameter):
            bitsandbytes.keep_layout(module)
        before = module._parameters.get(name)
        if before is not None and before.is_meta:  # its value comes from a checkpoint, and is final
            self._store(parameter, module, self._names.of(module, name))
            self.mapped.trim()

    def add_buffer(self, module: torch.nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        """A module registers a buffer, which stays in memory."""
        del name, buffer
        self._with_buffers.setdefault(module, next(self._numbers))

    def add_module(self, parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        """A parent takes a module over, whose parameters are complete."""
        self._names.add(parent, name, module)
        for own in module.modules() if module is not None else ():
            self._store_all_of(own)
            if own._buffers:
                self._with_buffers.setdefault(own, next(self._numbers))

    def finish(self) -> None:
        """Store what is left, and bring together what moves together."""
        self._store_waiting()
        self._tiers.drain()
        self._take_buffers_of_first()
        modules = _living(self._modules)
        stored = [own for own in _parameters_of(modules) if isinstance(own, StoredTensor) and self._is_of_block(own)]
        bring_together(stored)
        self._names.check(self._config, modules)
        warn_of_nothing_quantised(self._config, stored)
        staying = enumerate(filter(stays, _parameters_of(self._staying)), start=1)
        warn_of_staying({f"number {n} of shape {tuple(parameter.shape)}": parameter for n, parameter in staying})

    def _take_buffers_of_first(self) -> None:
        """Give every rank the first one's buffers. What was thrown away may be there still on some ranks alone, and is
        left out."""
        if self._ranks.size == 1:
            return
        buffers = dict(self._buffers())
        by_rank = self._ranks.of_all(list(buffers), "the buffers of models built in offloading()")
        on_all = set(buffers).intersection(*by_rank)
        for place, buffer in buffers.items():
            if place in on_all:
                self._ranks.broadcast(buffer, f"buffer '{place[1]}'")

    def _buffers(self) -> Iterator[tuple[tuple[int, str, tuple[int, ...]], torch.Tensor]]:
        """The buffers of the models, each with the number of its module, its name there and its shape."""
        for module, number in self._with_buffers.items():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    part = local_part(buffer)
                    yield (number, name, tuple(part.shape)), part

    def _is_of_block(self, parameter: StoredTensor) -> bool:
        """Whether a parameter was stored in this block, with its options, also where Module.to() stored it again."""
        return parameter.stored.key > self._begun_at and parameter.stored.tiers is self._tiers

    def _store_waiting(self) -> None:
        """Store the parameters of the module that registered the last ones."""
        if self._modules and (module := self._modules[-1]()) is not None:
            self._store_all_of(module)

    def _store_all_of(self, module: torch.nn.Module) -> None:
        for parameter in list(module._parameters.values()):
            if parameter is not None:
                self._store(parameter, module)

    @held_back
    def _store(self, parameter: torch.nn.Parameter, module: torch.nn.Module, loaded_as: str | None = None) -> None:
        """Store a module's parameter, unless it is stored or stays. `loaded_as`: the name of one that was loaded."""
        if stored_parameter(parameter) is not None or is_lazy(parameter) or parameter.is_meta:
            return
        if stays(parameter) and not bitsandbytes.has_codes(parameter):
            self._staying[module] = None
            return
        check_storable(parameter, f"a parameter of shape {tuple(parameter.shape)}")
        check_ranks(self._config, [parameter])
        self._ranks.meet(f"a parameter of shape {tuple(parameter.shape)} of a model that is being built")
        config = self._config
        is_looked_up = is_table(module)
        if config.frozen_dtype is not None and can_be_quantised(parameter) and not is_looked_up:
            config = self._names.config_of(config, loaded_as, parameter.shape)
            if config.frozen_dtype is not None:
                parameter.requires_grad_(False)
        form = form_of(parameter, config, {id(parameter)} if is_looked_up else ())
        twins = reserved_twins({"": parameter}, {"": form}, self._tiers, {"": config}, self._owners)
        # The twin gets the memory of `parameter`, and must not be kept.
        replace_in_place(parameter, with_value(parameter, twins.pop(), self.mapped if loaded_as else None))
        pass_through(parameter.nbytes)


class _Names:
    """The qualified names of parameters, as far as their model is built: which module took over which."""

    def __init__(self) -> None:
        self._parents: weakref.WeakKeyDictionary[torch.nn.Module, tuple[weakref.ref[torch.nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        """A module was registered in another."""
        if module is not None:
            self._parents[module] = weakref.ref(parent), name

    def of(self, module: torch.nn.Module, name: str) -> str:
        """The qualified name of a module's parameter, from the outermost module on."""
        outer: torch.nn.Module | None = module
        while outer is not None and outer in self._parents:
            parent, own = self._parents[outer]
            name, outer = f"{own}.{name}", parent()
        return name

    def config_of(self, config: Config, name: str | None, shape: Iterable[int]) -> Config:
        """The options of a matrix that could be quantised, without patterns. `name`: the qualified one of one that
        comes from a checkpoint; others have none yet.

        Raises: ConfigError where patterns are to say how that is stored, or none of them does.
        """
        if not isinstance(config.frozen_dtype, tuple):
            return config
        if name is None:
            raise ConfigError(
                f"frozen_dtype has patterns of names, and a matrix of shape {tuple(shape)} of a model that is being "
                "built has none yet: load the model by from_pretrained() in offloading(), give a format for all, or "
                "build the model outside and call offload() then"
            )
        return Config.of(config, {"frozen_dtype": config.frozen_dtype_of(name)})

    def check(self, config: Config, modules: Iterable[torch.nn.Module]) -> None:
        """Check that patterns are for the models that were built of modules. Raises: ConfigError."""
        names = [self.of(module, own) for module in modules for own in module._parameters]
        if isinstance(config.frozen_dtype, tuple) and names:
            check_patterns("frozen_dtype", config.frozen_dtype, (), "format", names)


def _parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The parameters of these modules' own, each once."""
    own = (parameter for module in modules for parameter in module._parameters.values() if parameter is not None)
    return list({id(parameter): parameter for parameter in own}.values())


def _living(references: Iterable[weakref.ref[T]]) -> list[T]:
    return [value for value in (reference() for reference in references) if value is not None]
