"""The processors that this process may use: their cores and NUMA nodes, and how much of their time it has."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from zinf_fx.control_groups import control_groups

_ROOT = Path("/")


@dataclass(frozen=True)
class Quota:
    """The time of so many processors, and the file that sets it."""

    processors: float
    source: str


@dataclass(frozen=True)
class Processors:
    """The processors that a process may use.

    Attributes:
        count: how many the system counts: all, or as many as `taskset`, `numactl` or a cpuset allows.
        cores: how many cores have these. A core with hyperthreads is several processors.
        nodes: the numbers of the NUMA nodes that have these.
        quota: what the control groups give the process of their time; None: all of it.
    """

    count: int
    cores: int
    nodes: tuple[int, ...]
    quota: Quota | None = None

    @property
    def busy_threads(self) -> int:
        """How many threads may compute all the time, each with a core of its own."""
        return self._within_quota(self.cores)

    @property
    def runnable_threads(self) -> int:
        """How many threads may run all the time, each on a processor of its own."""
        return self._within_quota(self.count)

    def _within_quota(self, threads: int) -> int:
        return threads if self.quota is None else max(1, min(threads, int(self.quota.processors)))


def processors(root: Path = _ROOT, allowed: Collection[int] | None = None) -> Processors:
    """Return the processors that the calling thread may use, and those that it starts.

    Args:
        root: the folder in which /proc and /sys are. They are read once.
        allowed: the numbers of the processors; None: those of the thread's affinity, as it is now.
    """
    machine = _machine(root)
    numbers = os.sched_getaffinity(0) if allowed is None else allowed
    cores = {machine.core_of.get(number, number) for number in numbers}
    nodes = {machine.node_of.get(number, 0) for number in numbers}
    return Processors(len(numbers), len(cores), tuple(sorted(nodes)), machine.quota)


class _Machine(NamedTuple):
    """By the numbers of processors: the first processor of the same core, and the NUMA node."""

    core_of: dict[int, int]
    node_of: dict[int, int]
    quota: Quota | None


@cache
def _machine(root: Path) -> _Machine:
    core_of: dict[int, int] = {}
    for file in root.glob("sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"):
        siblings = _numbers(file)
        core_of |= dict.fromkeys(siblings, min(siblings, default=0))
    node_of: dict[int, int] = {}
    for file in root.glob("sys/devices/system/node/node[0-9]*/cpulist"):
        node_of |= dict.fromkeys(_numbers(file), int(file.parent.name.removeprefix("node")))
    quotas = (_quota(version, folder) for version, folder in control_groups("cpu", root))
    smallest = min((quota for quota in quotas if quota is not None), key=lambda quota: quota.processors, default=None)
    return _Machine(core_of, node_of, smallest)


def _numbers(file: Path) -> list[int]:
    """Read a list of the kernel's, such as 0-3,8-11."""
    ranges = (part.partition("-") for part in file.read_text().strip().split(",") if part)
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def _quota(version: int, group: Path) -> Quota | None:
    """Read what one control group gives of processors' time: so many microseconds in each period of so many."""
    file, names = (group / "cpu.max", ()) if version == 2 else (group / "cpu.cfs_quota_us", ("cpu.cfs_period_us",))
    if not file.exists():
        return None
    quota, period = [*file.read_text().split(), *((group / name).read_text().strip() for name in names)]
    return None if quota in ("max", "-1") else Quota(int(quota) / int(period), str(file))
