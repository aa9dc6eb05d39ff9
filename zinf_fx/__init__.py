"""zinf_fx trains models far larger than device memory: ZeRO-Infinity as a compiler for PyTorch graphs."""

from __future__ import annotations

from zinf_fx import errors, optim
from zinf_fx.config import Config, Placement
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
