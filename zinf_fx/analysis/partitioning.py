"""Which states are divided over the data-parallel devices, and what one device has of them then.

ZeRO, section 5, and ZeRO-Infinity, table 2. The presets are those of `zinf_fx.config`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import sympy

from zinf_fx.analysis import symbols as s
from zinf_fx.config import PRESETS, Tier

State = Literal["parameters", "gradients", "optimizer"]
STATES: tuple[State, ...] = ("parameters", "gradients", "optimizer")

# ZeRO, section 5: P_os, P_os+g, P_os+g+p; ZeRO-Infinity, table 2. Each preset costs less to communicate than those
# after it, so the first that fits is the one to take (section 7.1: offload only what device memory can't hold). "nvme"
# is ZeRO-Infinity with gradients on NVMe too, as its largest models had them (section 7.7).
_BY_STAGE: tuple[State, ...] = ("optimizer", "gradients", "parameters")
PARTITIONED: dict[str, frozenset[State]] = {
    preset: frozenset(_BY_STAGE[: PRESETS[preset].stage])
    for preset in ("dp", "zero-1", "zero-2", "zero-3", "zero-offload", "infinity-cpu", "infinity-nvme", "nvme")
}

_BYTES = {"parameters": s.parameter_bytes, "gradients": s.gradient_bytes, "optimizer": s.optimizer_bytes}


def per_device(partitioned: Collection[State], states: Collection[State] = STATES) -> sympy.Expr:
    """Bytes of `states` that one device is responsible for.

    All states: 4Ψ + KΨ/N_d for P_os, 2Ψ + (2+K)Ψ/N_d for P_os+g, (4+K)Ψ/N_d for P_os+g+p (ZeRO, sections 5.1 to 5.3).
    """
    one = [_BYTES[state] * s.parameters / (s.ranks if state in partitioned else 1) for state in states]
    return sympy.Add(*one)


def on_tier(preset: str, tier: Tier) -> sympy.Expr:
    """Bytes of model states that one device is responsible for and that a preset puts on `tier`."""
    placement = PRESETS[preset]
    return per_device(PARTITIONED[preset], [state for state in STATES if getattr(placement, state) == tier])


def largest_model(partitioned: Collection[State]) -> sympy.Expr:
    """Parameters of the largest model whose states fit in device memory.

    Model parallelism divides the states before they are divided over data-parallel devices (ZeRO, table 2).
    """
    per_parameter = per_device(partitioned) / s.parameters
    return sympy.simplify(s.tensor_ranks * s.device_memory / per_parameter)
