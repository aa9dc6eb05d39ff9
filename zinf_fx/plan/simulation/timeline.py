"""Turn a simulated step into data for pictures: what each lane does when, and what each memory holds meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from zinf_fx.plan.memory.accounting import flows
from zinf_fx.plan.memory.use import arena_by_operator, staying_on_device
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE
from zinf_fx.plan.simulation.simulate import Simulation

Lane = Literal["step", "compute", "wait", "all-gather", "upload", "fetch", "reduce", "offload", "optimizer"]
LANES: tuple[Lane, ...] = ("compute", "all-gather", "upload", "fetch", "reduce", "offload", "optimizer")
# What compute waits for stands below what it does.
LANES_AND_WAITS: tuple[Lane, ...] = ("compute", "wait", *LANES[1:])

# By the kind of what is done: the first word of its name.
LANE_OF: dict[str, Lane] = {
    "forward": "compute",
    "backward": "compute",
    "inference": "compute",
    "wait": "wait",
    "allgather": "all-gather",
    "refresh": "all-gather",
    "upload": "upload",
    "fetch": "fetch",
    "reduce_scatter": "reduce",
    "all_reduce": "reduce",
    "offload": "offload",
    "read": "offload",
    "add": "offload",
    "write": "offload",
    "update": "optimizer",
    "read_states": "optimizer",
    "write_states": "optimizer",
}


_OPTIMIZER = {"read_states": "states read", "update": "the optimizer's arithmetic", "write_states": "states written"}


@dataclass(frozen=True)
class TimelineSlice:
    """A job in its lane.

    Attributes:
        start, end: its time in seconds.
        nbytes: bytes that it moves.
        detail: what it does, in words.
    """

    lane: Lane
    name: str
    start: float
    end: float
    nbytes: int
    detail: str


@dataclass(frozen=True)
class MemoryCurve:
    """The bytes that one memory holds during a step.

    Attributes:
        times: seconds at which the bytes change.
        nbytes: bytes from each of these times on.
        end: when the last operator ends, from when on the optimizer's step is alone.
        budget: the bytes that the plan keeps to; None: there is no budget.
    """

    memory: str
    times: tuple[float, ...]
    nbytes: tuple[int, ...]
    end: float
    budget: int | None


def slices(plan: Plan, simulation: Simulation) -> list[TimelineSlice]:
    """Return the jobs of a simulated step, in the order of their start."""
    operators = ((graph.kind, operator) for graph in plan.graphs for operator in graph.operators)
    labels = {(kind, str(operator.index)): operator.label for kind, operator in operators}
    drawn = []
    for job, timing in zip(simulation.jobs, simulation.timings, strict=True):
        detail = labels.get((job.kind, job.subject), job.subject)
        if job.parameters:
            detail = f"{_OPTIMIZER[job.kind]} of {_first_and_last(job.parameters)}"
        drawn.append(TimelineSlice(LANE_OF[job.kind], job.name, timing.start, timing.end, job.nbytes, detail))
    return sorted(drawn, key=lambda bar: bar.start)


def waits(simulation: Simulation) -> list[TimelineSlice]:
    """Return the times for which compute waits, with a slice for each job that it waits for."""
    drawn = []
    for stall in simulation.stalls():
        now = stall.start
        for job, seconds in stall.waited_for:
            name = "wait states" if job.kind in _OPTIMIZER else f"wait {job.subject}"  # as the runtime calls them
            drawn.append(TimelineSlice("wait", name, now, now + seconds, 0, f"for {job.name}, before {stall.before}"))
            now += seconds
    return drawn


def in_rows(unplaced: Iterable[TimelineSlice]) -> list[list[TimelineSlice]]:
    """Divide slices into as few rows as possible, at least one, so that no two slices of a row overlap."""
    rows: list[list[TimelineSlice]] = [[]]
    for bar in sorted(unplaced, key=lambda bar: (bar.start, bar.end)):
        free = next((row for row in rows if not row or row[-1].end <= bar.start), None)
        if free is None:
            rows.append(free := [])
        free.append(bar)
    return rows


def memory_curves(plan: Plan, simulation: Simulation) -> list[MemoryCurve]:
    """Return the curves of device memory (what stays, is kept for backward or is in flight) and of the host arena. An
    operator's bytes count from the end of the operator before it, and the prologue's from the graph's beginning."""
    ends = {job.name: timing.end for job, timing in zip(simulation.jobs, simulation.timings, strict=True)}
    times: list[float] = []
    device: list[int] = []
    host: list[int] = []
    staying = staying_on_device(plan)
    now = 0.0
    for graph in plan.graphs:
        of_graph, arena = flows(plan, graph), arena_by_operator(plan, graph)
        for flow, in_arena in zip(of_graph, arena, strict=True):
            times.append(now)
            device.append(staying + flow.device)
            host.append(in_arena)
            if flow.operator != PROLOGUE:
                now = ends[f"{graph.kind} {flow.operator}"]
    config = plan.config
    return [
        MemoryCurve("device", tuple(times), tuple(device), now, config.device_memory),
        MemoryCurve("host", tuple(times), tuple(host), now, config.host_memory),
    ]


def _first_and_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
