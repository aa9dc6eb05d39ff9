"""Whether a preset fits: what is on each tier, and what it takes to make room on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy

from zinf_fx.analysis.partitioning import PARTITIONED, on_tier
from zinf_fx.analysis.symbols import evaluate
from zinf_fx.config import PRESETS
from zinf_fx.estimate.workload import Workload
from zinf_fx.placement import TIERS, Tier
from zinf_fx.plan.hardware import Hardware


@dataclass(frozen=True)
class Fit:
    """What a preset puts where.

    Attributes:
        checkpoints: where activation checkpoints wait: on the device, or in host memory if only so it fits.
        tiles: parts of the largest operator, of which one is in working memory at a time.
        memory: bytes on each tier: of one device, of one node's host memory, of one node's NVMe.
        exceeded: the tiers that are too small.
    """

    checkpoints: Tier
    tiles: int
    memory: Mapping[Tier, int]
    exceeded: tuple[Tier, ...]


def fit(preset: str, workload: Workload, hardware: Hardware, values: Mapping[sympy.Symbol, float]) -> Fit:
    """The first way in which the device has room, else the last way."""
    for one in _ways(preset, workload, hardware, values):
        if "device" not in one.exceeded:
            break
    return one


def _ways(preset: str, workload: Workload, hardware: Hardware, values: Mapping[sympy.Symbol, float]) -> Iterator[Fit]:
    """Those first that move less.

    The device works on one operator's parameter and gradient and on the activations between checkpoints at a time
    (ZeRO-Infinity, section 3); on the operator's apart from the states, where it doesn't hold all parameters anyway.
    Parameters that it doesn't hold can be tiled (section 5.1.3), and where they left it, checkpoints may too (5.1.2).
    """
    per_node = {"device": 1, "host": hardware.ranks_per_node, "nvme": hardware.ranks_per_node}
    states = {tier: round(per_node[tier] * evaluate(on_tier(preset, tier), values)) for tier in TIERS}
    capacity = {tier: getattr(hardware, tier).capacity for tier in TIERS}

    def way(checkpoints: Tier, tiles: int) -> Fit:
        memory = dict(states)
        memory["device"] += workload.working_activations + (math.ceil(workload.working_states / tiles) if apart else 0)
        memory[checkpoints] += per_node[checkpoints] * workload.checkpoints
        return Fit(checkpoints, tiles, memory, tuple(tier for tier in TIERS if memory[tier] > capacity[tier]))

    apart = "parameters" in PARTITIONED[preset]
    places: tuple[Tier, ...] = ("device",) if PRESETS[preset].parameters == "device" else ("device", "host")
    for place in places:
        yield way(place, 1)
    kept = workload.checkpoints if places[-1] == "device" else 0
    room = capacity["device"] - states["device"] - workload.working_activations - kept
    if apart and room > 0:
        yield way(places[-1], math.ceil(workload.working_states / room))
