"""Timelines in the trace event format of Chrome, which Perfetto opens (ui.perfetto.dev): a process for each timeline,
a track for each lane."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.simulate import Simulation
from zinf_fx.plan.simulation.timeline import (
    LANES_AND_WAITS,
    MemoryCurve,
    TimelineSlice,
    in_rows,
    memory_curves,
    slices,
    waits,
)


@dataclass(frozen=True)
class TraceProcess:
    """One timeline of a trace.

    Attributes:
        start: seconds that all of its times are shown later.
    """

    name: str
    slices: Sequence[TimelineSlice]
    memory: Sequence[MemoryCurve] = ()
    start: float = 0.0


def planned_process(plan: Plan, simulation: Simulation, hardware: Hardware, start: float = 0.0) -> TraceProcess:
    """A simulated step. `start`: of the step, in the trace."""
    return TraceProcess(
        f"planned, on {hardware.name}",
        [TimelineSlice("step", "step", 0.0, simulation.seconds, 0, ""), *slices(plan, simulation), *waits(simulation)],
        memory_curves(plan, simulation),
        start,
    )


def to_chrome(*processes: TraceProcess) -> str:
    """The trace: one track per lane, or several where its slices overlap, and counters of the memories. Times are in
    microseconds."""
    events = [event for number, process in enumerate(processes, start=1) for event in _events(number, process)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _events(pid: int, process: TraceProcess) -> Iterator[dict[str, Any]]:
    yield _named(pid, "process_name", 0, {"name": process.name})
    yield _named(pid, "process_sort_index", 0, {"sort_index": pid})
    tid = 0
    for lane in ("step", *LANES_AND_WAITS):
        for row in in_rows([bar for bar in process.slices if bar.lane == lane]):
            yield _named(pid, "thread_name", tid, {"name": lane})
            yield _named(pid, "thread_sort_index", tid, {"sort_index": tid})
            for bar in row:
                begin, end = _nanoseconds(process, bar.start), _nanoseconds(process, bar.end)
                yield {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "name": bar.name,
                    "cat": lane,
                    "ts": begin / 1e3,
                    "dur": (end - begin) / 1e3,
                    "args": {"of": bar.detail, "bytes": bar.nbytes},
                }
            tid += 1
    for curve in process.memory:
        held = {"budget": curve.budget} if curve.budget is not None else {}
        for time, nbytes in zip(curve.times, curve.nbytes, strict=True):
            name, at = f"{curve.memory} memory", _nanoseconds(process, time) / 1e3
            yield {"ph": "C", "pid": pid, "name": name, "ts": at, "args": {"bytes": nbytes} | held}


def _nanoseconds(process: TraceProcess, seconds: float) -> int:
    """What viewers count in: rounded once, so that a slice doesn't end after the beginning of the next."""
    return round((process.start + seconds) * 1e9)


def _named(pid: int, what: str, thread: int, given: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": thread, "name": what, "args": given}
