"""accelerate, through which transformers' Trainer compiles, accepts the backends of a closed list: "zinf" joins it.

Importing this module takes effect whenever accelerate is imported, before or after, and doesn't import it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "ZINF"
_MODULE = "accelerate.utils.dataclasses"


def add_backend(module: ModuleType) -> None:
    """Let the enumeration `DynamoBackend` of accelerate's `module` have a member for this backend."""
    kind = module.DynamoBackend

    def missing(cls: type, value: object) -> object:
        if value != NAME:
            return None
        member = str.__new__(cls, NAME)
        member._name_ = member._value_ = NAME
        return member

    kind._missing_ = classmethod(missing)


class _Finder(MetaPathFinder):
    """Finds accelerate's module as it would be found without this, and adds the backend once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                add_backend(module)

            spec.loader.exec_module = exec_module
        return spec


if _MODULE in sys.modules:
    add_backend(sys.modules[_MODULE])
else:
    sys.meta_path.insert(0, _Finder())
