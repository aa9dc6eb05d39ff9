"""A discrete-event simulation of jobs on resources: how long they take, what is busy, and what the rest waits for.

Each resource does one job at a time, in the order in which jobs become ready; of those that become ready together, the
one that the program comes to first. So a job starts at the moment when another one ends: its cause, either the last
that it had to wait for, or the one that had the resource before it. Causes make the critical path.

Where the processors that compute also move the disk's bytes, computing is slower while the disk is busy, by the load of
what it does. Where the disk has been idle, a read that comes next takes its latency besides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zinf_fx.errors import PlanError
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.event_graph import RESOURCES, Compute, Job, Resource, event_graph
from zinf_fx.plan.simulation.operator_time import compute_seconds


@dataclass(frozen=True)
class Timing:
    """When a job runs, and the index of the job at whose end it started; None: it started at once."""

    start: float
    end: float
    cause: int | None


@dataclass(frozen=True)
class Stall:
    """From when on and how long compute waited before one job, and for which jobs, each with its part of the time."""

    before: str
    start: float
    seconds: float
    waited_for: tuple[tuple[Job, float], ...]


@dataclass(frozen=True)
class Simulation:
    """Jobs, and when each of them runs; what was computed beside a load, or found its resource idle, has the seconds
    that it took so. `flops`: those that one device does, recomputation included."""

    jobs: tuple[Job, ...]
    timings: tuple[Timing, ...]
    flops: int = 0

    @property
    def seconds(self) -> float:
        """Until the last job ends."""
        return max((timing.end for timing in self.timings), default=0.0)

    @property
    def flops_per_second(self) -> float:
        """Of one device."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def busy(self) -> dict[Resource, float]:
        """Seconds of work of each resource."""
        return _by_resource((job, job.seconds) for job in self.jobs)

    @property
    def utilisation(self) -> dict[Resource, float]:
        """The share of the time that each resource works."""
        return {resource: work / self.seconds if work else 0.0 for resource, work in self.busy.items()}

    @property
    def critical_path(self) -> list[int]:
        """Indices of the jobs that decide how long all takes, in order. Each starts when the one before it ends."""
        ends = [timing.end for timing in self.timings]
        return [*self._causes(ends.index(max(ends)))][::-1] if ends else []

    @property
    def critical_seconds(self) -> dict[Resource, float]:
        """Seconds of the critical path, by resource: together, all of the time."""
        return _by_resource((self.jobs[index], self.jobs[index].seconds) for index in self.critical_path)

    @property
    def stalled(self) -> dict[Resource, float]:
        """Seconds for which compute waited, by the resource that it waited for."""
        return _by_resource(waited for stall in self.stalls() for waited in stall.waited_for)

    def stalls(self) -> list[Stall]:
        """Every time for which compute had nothing to do before one of its jobs, and what it waited for."""
        found = []
        computing = [index for index, job in enumerate(self.jobs) if job.resource == "compute"]
        idle_since = 0.0
        for index in sorted(computing, key=lambda index: (self.timings[index].start, self.timings[index].end)):
            start = self.timings[index].start
            if start > idle_since:
                blamed = tuple(self._blamed(index, idle_since))
                found.append(Stall(self.jobs[index].name, idle_since, start - idle_since, blamed))
            idle_since = self.timings[index].end
        return found

    def _blamed(self, index: int, since: float) -> Iterator[tuple[Job, float]]:
        causes = [one for one in self._causes(index) if one != index and self.timings[one].end > since]
        for one in reversed(causes):
            timing = self.timings[one]
            yield self.jobs[one], timing.end - max(timing.start, since)

    def _causes(self, index: int | None) -> Iterator[int]:
        """A job, its cause, the cause of that, and so on."""
        while index is not None:
            yield index
            index = self.timings[index].cause


def _by_resource(seconds: Iterable[tuple[Job, float]]) -> dict[Resource, float]:
    """The sums of seconds of jobs."""
    found = dict.fromkeys(RESOURCES, 0.0)
    for job, of_job in seconds:
        found[job.resource] += of_job
    return found


def simulate(jobs: Sequence[Job]) -> Simulation:
    """Run jobs on resources. Raises: PlanError: jobs wait for each other in a circle."""
    open_count = [len(set(job.after)) for job in jobs]
    followers: list[list[int]] = [[] for _ in jobs]
    for index, job in enumerate(jobs):
        for before in set(job.after):
            followers[before].append(index)
    queues: dict[Resource, list[tuple[float, int]]] = {resource: [] for resource in RESOURCES}
    last: dict[Resource, int | None] = dict.fromkeys(RESOURCES)
    idle_since: dict[Resource, float] = dict.fromkeys(RESOURCES, -1.0)
    running: dict[Resource, int] = {}
    released: list[int | None] = [None] * len(jobs)
    timings: list[Timing | None] = [None] * len(jobs)
    ending: list[tuple[float, int]] = []
    now, speed = 0.0, 1.0  # that of computing
    loaded = any(job.load for job in jobs)
    for index, count in enumerate(open_count):
        if not count:
            heapq.heappush(queues[jobs[index].resource], (now, index))
    while True:
        for resource, queue in queues.items():
            if queue and resource not in running:
                ready, index = heapq.heappop(queue)
                cause = released[index] if ready == now else last[resource]
                latency = jobs[index].latency if idle_since[resource] < now else 0.0
                end = now + latency + jobs[index].seconds / (speed if resource == "compute" else 1.0)
                timings[index] = Timing(now, end, cause)
                heapq.heappush(ending, (end, index))
                running[resource] = last[resource] = index
        if not ending:
            break
        if loaded:
            before, speed = speed, 1.0 - sum(jobs[index].load for index in running.values())
            if "compute" in running and speed != before:
                index = running["compute"]
                end = now + (timings[index].end - now) * before / speed
                timings[index] = replace(timings[index], end=end)
                heapq.heappush(ending, (end, index))
        now = ending[0][0]
        while ending and ending[0][0] == now:
            _, done = heapq.heappop(ending)
            resource = jobs[done].resource
            if running.get(resource) != done or timings[done].end != now:
                continue  # it ends at another time, because computing was slower or faster since
            del running[resource]
            idle_since[resource] = now
            for follower in followers[done]:
                open_count[follower] -= 1
                if not open_count[follower]:
                    released[follower] = done
                    heapq.heappush(queues[jobs[follower].resource], (now, follower))
    finished = tuple(timing for timing in timings if timing is not None)
    if len(finished) < len(jobs):
        stuck = next(job.name for job, timing in zip(jobs, timings, strict=True) if timing is None)
        raise PlanError(f"{stuck!r} can't be simulated: what it waits for waits for it")
    if loaded or any(job.latency for job in jobs):
        jobs = [
            replace(job, seconds=timing.end - timing.start, latency=0.0)
            if job.resource == "compute" or job.latency
            else job
            for job, timing in zip(jobs, finished, strict=True)
        ]
    return Simulation(tuple(jobs), finished)


def one_after_another(jobs: Sequence[Job]) -> Simulation:
    """Run jobs with nothing overlapped: each when the one that the program comes to before it is done."""
    timings, now = [], 0.0
    for index, job in enumerate(jobs):
        timings.append(Timing(now, now + job.seconds, index - 1 if index else None))
        now += job.seconds
    return Simulation(tuple(jobs), tuple(timings))


def simulate_plan(
    plan: Plan,
    hardware: Hardware,
    compute: Compute | None = None,
    run: Callable[[Sequence[Job]], Simulation] = simulate,
    overlap: bool = True,
    accumulate: int = 1,
    in_backward: bool = False,
) -> Simulation:
    """A step of a plan on one rank of the hardware.

    Args:
        compute: measured seconds of each operator; default what the hardware's figures say.
        run: how its jobs follow each other.
        overlap: the optimizer's step goes on in the next forward pass.
        accumulate: how many micro-batches a loop runs the plan's graphs for before the optimizer's step.
        in_backward: the optimizer updates each parameter in backward, when its gradient is whole.

    Raises: PlanError for another number of ranks, and for `in_backward` of several micro-batches; ConfigError for a
    dtype without a peak.
    """
    compute = compute_seconds(plan, hardware) if compute is None else compute
    flops = accumulate * sum(operator.flops for graph in plan.graphs for operator in graph.operators)
    return replace(run(event_graph(plan, hardware, compute, overlap, accumulate, in_backward)), flops=flops)
