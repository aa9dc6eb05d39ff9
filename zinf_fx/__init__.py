"""zinf_fx trains models far larger than device memory: ZeRO-Infinity as a compiler for PyTorch graphs."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from zinf_fx import errors
from zinf_fx.config import Config, Placement

if TYPE_CHECKING:
    from zinf_fx import optim
    from zinf_fx.explain import explain
    from zinf_fx.export import export_plan
    from zinf_fx.plan.file import load_plan
    from zinf_fx.plan.plan import Plan
    from zinf_fx.recording import record
    from zinf_fx.runtime.gathered import gathered
    from zinf_fx.runtime.offload import offload, offloading
    from zinf_fx.runtime.reduction import no_sync
    from zinf_fx.runtime.stored_tensor import StoredTensor
    from zinf_fx.stats import stats

__all__ = [
    "Config",
    "Placement",
    "Plan",
    "StoredTensor",
    "errors",
    "explain",
    "export_plan",
    "gathered",
    "load_plan",
    "no_sync",
    "offload",
    "offloading",
    "optim",
    "record",
    "stats",
]

# PyTorch takes seconds to import, and `zinf-fx --help` needs none of it: so the names that need it come when the first
# of them is used, all at once, because `optim` registers what stored tensors need in any optimizer.
_LATER = {
    "optim": "zinf_fx.optim",
    "explain": "zinf_fx.explain",
    "export_plan": "zinf_fx.export",
    "load_plan": "zinf_fx.plan.file",
    "Plan": "zinf_fx.plan.plan",
    "record": "zinf_fx.recording",
    "gathered": "zinf_fx.runtime.gathered",
    "offload": "zinf_fx.runtime.offload",
    "offloading": "zinf_fx.runtime.offload",
    "no_sync": "zinf_fx.runtime.reduction",
    "StoredTensor": "zinf_fx.runtime.stored_tensor",
    "stats": "zinf_fx.stats",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("zinf_fx.runtime.replacement")  # registers what takes the place of stored parameters
    import_module("zinf_fx.runtime.wrapping")  # warns of DistributedDataParallel around them
    for public, home in _LATER.items():
        module = import_module(home)
        globals()[public] = module if public == "optim" else getattr(module, public)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package: `explain` and `stats` are its functions, not the modules of these names that have them."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in ("explain", "stats") and isinstance(value, ModuleType)):  # as the import of one would set it
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
