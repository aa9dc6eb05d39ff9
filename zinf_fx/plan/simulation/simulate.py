"""Simulate jobs on resources by discrete events: how long they take, what is busy, and what waits for what.

Each resource but the disk does one job at a time, in the order in which jobs become ready; jobs that become ready
together run in the order in which the program comes to them. The disk works at as many blocks at a time as the engine
has under way, and the jobs of these blocks share its rate. A job starts at the moment when its cause ends, or a block
of its cause: the last job that it had to wait for, or one that made room for it. Causes make the critical path.

Where the processors that compute also move the disk's bytes, compute is slower while the disk is busy, by the load of
the disk's jobs, and the disk is slower while something is computed. The disk is also slower the fewer blocks are under
way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zinf_fx.errors import PlanError
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.intervals import covered
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.event_graph import RESOURCES, Compute, Job, Resource, event_graph
from zinf_fx.plan.simulation.operator_time import compute_seconds
from zinf_fx.plan.simulation.server import Server


@dataclass(frozen=True)
class Timing:
    """The time from `start` to `end` in which a job runs, and the index of its cause: it started when that job, or a
    block of that, ended. None: it started at once."""

    start: float
    end: float
    cause: int | None


@dataclass(frozen=True)
class Stall:
    """A time for which compute waits before the job `before`, and the jobs that it waits for, each with its seconds."""

    before: str
    start: float
    seconds: float
    waited_for: tuple[tuple[Job, float], ...]


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        timings: when each job runs. That takes longer than the job's own seconds beside a load, or where the job shares
            the disk.
        flops: FLOP of one device, recomputation included.
    """

    jobs: tuple[Job, ...]
    timings: tuple[Timing, ...]
    flops: int = 0

    @property
    def seconds(self) -> float:
        """Return the time at which the last job ends."""
        return max((timing.end for timing in self.timings), default=0.0)

    @property
    def flops_per_second(self) -> float:
        """Return the FLOP per second of one device."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def busy(self) -> dict[Resource, float]:
        """Return the seconds for which each resource works."""
        spans: dict[Resource, list[tuple[float, float]]] = {resource: [] for resource in RESOURCES}
        for job, timing in zip(self.jobs, self.timings, strict=True):
            spans[job.resource].append((timing.start, timing.end))
        return {resource: covered(of_resource) for resource, of_resource in spans.items()}

    @property
    def utilisation(self) -> dict[Resource, float]:
        """Return the share of the time for which each resource works."""
        return {resource: work / self.seconds if work else 0.0 for resource, work in self.busy.items()}

    @property
    def critical_path(self) -> list[int]:
        """Return the indices of the jobs that decide how long all takes, in order. Each starts when the job before it
        ends, or a block of that job."""
        ends = [timing.end for timing in self.timings]
        return [*self._causes(ends.index(max(ends)))][::-1] if ends else []

    @property
    def critical_seconds(self) -> dict[Resource, float]:
        """Return the seconds of the critical path by resource, whose sum is `seconds`."""
        path = self.critical_path
        starts = [self.timings[index].start for index in path]
        lengths = (until - start for start, until in zip(starts, [*starts[1:], self.seconds], strict=True))
        return _by_resource(zip((self.jobs[index] for index in path), lengths, strict=True))

    @property
    def stalled(self) -> dict[Resource, float]:
        """Return the seconds for which compute waited, by the resource that it waited for."""
        return _by_resource(waited for stall in self.stalls() for waited in stall.waited_for)

    def stalls(self) -> list[Stall]:
        """Return every time for which compute waited before one of its jobs, and the jobs that it waited for."""
        stalls = []
        computing = [index for index, job in enumerate(self.jobs) if job.resource == "compute"]
        idle_since = 0.0
        for index in sorted(computing, key=lambda index: (self.timings[index].start, self.timings[index].end)):
            start = self.timings[index].start
            if start > idle_since:
                blamed = tuple(self._blamed(index, idle_since))
                stalls.append(Stall(self.jobs[index].name, idle_since, start - idle_since, blamed))
            idle_since = self.timings[index].end
        return stalls

    def _blamed(self, index: int, since: float) -> Iterator[tuple[Job, float]]:
        blamed, until = [], self.timings[index].start
        for cause in self._causes(self.timings[index].cause):
            if until <= since:
                break
            start = max(self.timings[cause].start, since)
            blamed.append((self.jobs[cause], until - start))
            until = start
        return reversed(blamed)

    def _causes(self, index: int | None) -> Iterator[int]:
        """Yield a job, its cause, the cause of that, and so on."""
        while index is not None:
            yield index
            index = self.timings[index].cause


def _by_resource(seconds: Iterable[tuple[Job, float]]) -> dict[Resource, float]:
    totals = dict.fromkeys(RESOURCES, 0.0)
    for job, of_job in seconds:
        totals[job.resource] += of_job
    return totals


def simulate(jobs: Sequence[Job], depth: int = 1, alone: float = 1.0, beside: float = 1.0) -> Simulation:
    """Run jobs on resources.

    Args:
        depth: how many blocks the disk works at together.
        alone: the share of its speed that the disk has while one of several blocks is under way; with a depth of 1, it
            has all of it.
        beside: the share of its speed that the disk keeps while something is computed.

    Raises: PlanError where jobs wait for each other in a circle.
    """
    open_count = [len(set(job.after)) for job in jobs]
    followers: list[list[int]] = [[] for _ in jobs]
    for index, job in enumerate(jobs):
        for before in set(job.after):
            followers[before].append(index)
    compute, disk = Server(jobs), Server(jobs, depth, alone)
    steady: dict[Resource, Server] = {name: Server(jobs) for name in RESOURCES if name not in ("compute", "disk")}
    servers: dict[Resource, Server] = {"compute": compute, "disk": disk, **steady}
    starts: list[tuple[float, int | None] | None] = [None] * len(jobs)
    ends: list[float | None] = [None] * len(jobs)
    released: list[int | None] = [None] * len(jobs)
    changed = set()
    now = 0.0
    for index, count in enumerate(open_count):
        if not count:
            servers[jobs[index].resource].put(index, now)
            changed.add(servers[jobs[index].resource])
    while changed:
        for server in changed:
            for index, before in server.start(now):
                starts[index] = now, released[index] if before is None else before
        for server in steady.values():
            server.go_on(now)
        disk.go_on(now, beside if compute.busy else 1.0)  # each slows the other
        compute.go_on(now, 1.0 - disk.load)
        now = min(server.next_end for server in servers.values())
        changed = {server for server in servers.values() if server.next_end == now < math.inf}
        for done in sorted(index for server in changed for index in server.end(now)):
            ends[done] = now
            for follower in followers[done]:
                open_count[follower] -= 1
                if not open_count[follower]:
                    released[follower] = done
                    server = servers[jobs[follower].resource]
                    server.put(follower, now)
                    changed.add(server)
    timings = tuple(
        Timing(start[0], end, start[1])
        for start, end in zip(starts, ends, strict=True)
        if start is not None and end is not None
    )
    if len(timings) < len(jobs):
        stuck = next(job.name for job, end in zip(jobs, ends, strict=True) if end is None)
        raise PlanError(f"{stuck!r} can't be simulated: what it waits for waits for it")
    return Simulation(tuple(jobs), timings)


def one_after_another(jobs: Sequence[Job]) -> Simulation:
    """Run jobs without overlap, in the order in which the program comes to them."""
    timings, now = [], 0.0
    for index, job in enumerate(jobs):
        timings.append(Timing(now, now + job.seconds, index - 1 if index else None))
        now += job.seconds
    return Simulation(tuple(jobs), tuple(timings))


def simulate_plan(
    plan: Plan,
    hardware: Hardware,
    compute: Compute | None = None,
    in_turn: bool = False,
    overlap: bool = True,
    accumulate: int = 1,
    in_backward: bool = False,
) -> Simulation:
    """Simulate a step of a plan on one rank of the hardware.

    Args:
        compute: measured seconds of each operator; by default, they follow from the hardware's figures.
        in_turn: jobs run one after another, without overlap.
        overlap: the optimizer's step goes on in the next forward pass.
        accumulate: how many micro-batches a loop runs the plan's graphs for before the optimizer's step.
        in_backward: the optimizer updates each parameter in backward, when its gradient is whole.

    Raises: PlanError for another number of ranks, and for `in_backward` of several micro-batches; ConfigError for a
    dtype without a peak.
    """
    compute = compute_seconds(plan, hardware) if compute is None else compute
    flops = accumulate * sum(operator.flops for graph in plan.graphs for operator in graph.operators)
    jobs = event_graph(plan, hardware, compute, overlap, accumulate, in_backward)
    if in_turn:
        return replace(one_after_another(jobs), flops=flops)
    disks = hardware.nvme
    simulation = simulate(jobs, disks.depth, disks.alone, disks.beside if hardware.unified else 1.0)
    return replace(simulation, flops=flops)
