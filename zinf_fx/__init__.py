"""zinf_fx trains models far larger than device memory: ZeRO-Infinity as a compiler for PyTorch graphs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from zinf_fx import errors
from zinf_fx.config import Config, Placement

if TYPE_CHECKING:
    from zinf_fx import integrations, optim
    from zinf_fx.checkpoint.export import export_safetensors
    from zinf_fx.checkpoint.load import load_checkpoint
    from zinf_fx.checkpoint.manager import CheckpointManager
    from zinf_fx.checkpoint.save import save_checkpoint
    from zinf_fx.checkpoint.weights import load_safetensors
    from zinf_fx.frontend.base import attach_base
    from zinf_fx.frontend.construction import offloading
    from zinf_fx.frontend.explain import explain, export_plan
    from zinf_fx.frontend.offload import offload
    from zinf_fx.observe.recording import record
    from zinf_fx.observe.stats import stats
    from zinf_fx.plan.files.file import load_plan
    from zinf_fx.plan.plan import Plan
    from zinf_fx.runtime.gradients.reduction import no_sync
    from zinf_fx.runtime.tensor.gathered import gathered
    from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

__all__ = [
    "CheckpointManager",
    "Config",
    "Placement",
    "Plan",
    "StoredTensor",
    "attach_base",
    "errors",
    "explain",
    "export_plan",
    "export_safetensors",
    "gathered",
    "integrations",
    "load_checkpoint",
    "load_plan",
    "load_safetensors",
    "no_sync",
    "offload",
    "offloading",
    "optim",
    "record",
    "save_checkpoint",
    "stats",
]

# PyTorch takes seconds to import, and `zinf-fx --help` needs none of it: so the names that need it come when the first
# of them is used, all at once, because `optim` registers what stored tensors need in any optimizer.
_LATER = {
    "optim": "zinf_fx.optim",
    "attach_base": "zinf_fx.frontend.base",
    "explain": "zinf_fx.frontend.explain",
    "export_plan": "zinf_fx.frontend.explain",
    "export_safetensors": "zinf_fx.checkpoint.export",
    "load_safetensors": "zinf_fx.checkpoint.weights",
    "load_plan": "zinf_fx.plan.files.file",
    "Plan": "zinf_fx.plan.plan",
    "record": "zinf_fx.observe.recording",
    "gathered": "zinf_fx.runtime.tensor.gathered",
    "offload": "zinf_fx.frontend.offload",
    "offloading": "zinf_fx.frontend.construction",
    "no_sync": "zinf_fx.runtime.gradients.reduction",
    "StoredTensor": "zinf_fx.runtime.tensor.stored_tensor",
    "stats": "zinf_fx.observe.stats",
    "CheckpointManager": "zinf_fx.checkpoint.manager",
    "load_checkpoint": "zinf_fx.checkpoint.load",
    "save_checkpoint": "zinf_fx.checkpoint.save",
}


def __getattr__(name: str) -> object:
    if name == "integrations":
        return import_module("zinf_fx.integrations")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("zinf_fx.frontend.module_hooks")  # registers hooks on modules with stored parameters
    for public, home in _LATER.items():
        module = import_module(home)
        globals()[public] = module if public == "optim" else getattr(module, public)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
