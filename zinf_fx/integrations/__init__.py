"""What other libraries need to know of zinf_fx: a module for each, which is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_LIBRARIES = ("accelerate", "distributed_checkpoint", "lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _LIBRARIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(_LIBRARIES)}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIBRARIES})
