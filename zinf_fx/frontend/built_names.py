"""The names of parameters of models that are being built."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError
from zinf_fx.placement import check_patterns


class BuiltNames:
    """Which module took over which, and so the qualified names of what is in them, as far as they are built."""

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
        while module in self._parents:
            parent, own = self._parents[module]
            name, module = f"{own}.{name}", parent()
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
