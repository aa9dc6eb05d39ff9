"""A plan's timeline in the trace event format of Chrome, which Perfetto opens (ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.schedule import Plan
from zinf_fx.plan.simulate import Simulation
from zinf_fx.plan.timeline import LANES, memory_curves, slices

_PLANNED = 1
_MICRO = 1e6


def to_chrome(plan: Plan, simulation: Simulation, hardware: Hardware) -> str:
    """One track per lane, and counters of the memories. Times are the simulator's, in microseconds."""
    events = [
        _named("process_name", 0, {"name": f"planned, on {hardware.name}"}),
        *(_named("thread_name", number, {"name": lane}) for number, lane in enumerate(LANES)),
        *(_named("thread_sort_index", number, {"sort_index": number}) for number, _ in enumerate(LANES)),
        *_slices(plan, simulation),
        *_counters(plan, simulation),
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _named(what: str, thread: int, given: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": _PLANNED, "tid": thread, "name": what, "args": given}


def _slices(plan: Plan, simulation: Simulation) -> Iterator[dict[str, Any]]:
    for one in slices(plan, simulation):
        yield {
            "ph": "X",
            "pid": _PLANNED,
            "tid": LANES.index(one.lane),
            "name": one.name,
            "cat": one.lane,
            "ts": one.start * _MICRO,
            "dur": (one.end - one.start) * _MICRO,
            "args": {"of": one.detail, "bytes": one.nbytes},
        }


def _counters(plan: Plan, simulation: Simulation) -> Iterator[dict[str, Any]]:
    for curve in memory_curves(plan, simulation):
        for time, nbytes in zip(curve.times, curve.nbytes, strict=True):
            held = {"bytes": nbytes} | ({"budget": curve.budget} if curve.budget is not None else {})
            yield {"ph": "C", "pid": _PLANNED, "name": f"{curve.memory} memory", "ts": time * _MICRO, "args": held}
