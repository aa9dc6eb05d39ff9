"""The processors that a process may use, of machines that are made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zinf_fx.processors import Processors, Quota, processors

HALF, GROUP = "50000 100000", "sys/fs/cgroup"


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def server(root: Path) -> Path:
    """Two sockets of four cores of two hyperthreads each, numbered as Linux does: first of all cores, then second."""
    siblings = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 8},{n % 8 + 8}" for n in range(16)
    }
    lists = ("0-3,8-11", "4-7,12-15", "")  # the last is memory without processors
    nodes = {f"sys/devices/system/node/node{number}/cpulist": text for number, text in enumerate(lists)}
    return made(root, siblings | nodes)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (range(16), Processors(16, 8, (0, 1))),
        (range(8), Processors(8, 8, (0, 1))),
        ([0, 8, 1, 9], Processors(4, 2, (0,))),
        ([5, 13, 12], Processors(3, 2, (1,))),
    ],
)
def test_cores_count_once_and_nodes_are_those_of_the_allowed(
    tmp_path: Path, allowed: list[int], expected: Processors
) -> None:
    counted = processors(server(tmp_path), allowed)
    assert counted == expected and counted.busy_threads == expected.cores and counted.runnable_threads == expected.count


QUOTAS = {
    "half a processor": ({"proc/self/cgroup": "0::/", f"{GROUP}/cpu.max": HALF}, 0.5, "cpu.max", 1),
    "of a group around": (
        {"proc/self/cgroup": "0::/job/step", f"{GROUP}/job/step/cpu.max": "max 100000", f"{GROUP}/job/cpu.max": "3 1"},
        3.0,
        "job/cpu.max",
        3,
    ),
    "the smallest": (
        {"proc/self/cgroup": "0::/job", f"{GROUP}/job/cpu.max": "250000 100000", f"{GROUP}/cpu.max": "7 1"},
        2.5,
        "job/cpu.max",
        2,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/0123\n4:memory:/",
            f"{GROUP}/cpu/cpu.cfs_quota_us": "400000",
            f"{GROUP}/cpu/cpu.cfs_period_us": "100000",
        },
        4.0,
        "cpu/cpu.cfs_quota_us",
        4,
    ),
    "more than there are": ({"proc/self/cgroup": "0::/", f"{GROUP}/cpu.max": "64 1"}, 64.0, "cpu.max", 8),
}


@pytest.mark.parametrize(("files", "quota", "source", "threads"), QUOTAS.values(), ids=QUOTAS)
def test_quotas_of_control_groups(
    tmp_path: Path, files: dict[str, str], quota: float, source: str, threads: int
) -> None:
    counted = processors(made(server(tmp_path), files), range(16))
    assert counted.quota == Quota(quota, str(tmp_path / GROUP / source)) and counted.busy_threads == threads


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/", f"{GROUP}/cpu.max": "max 100000"},
        {
            "proc/self/cgroup": "1:cpu:/",
            f"{GROUP}/cpu/cpu.cfs_quota_us": "-1",
            f"{GROUP}/cpu/cpu.cfs_period_us": "100000",
        },
        {"proc/self/cgroup": "1:memory:/\n0::/gone"},
    ],
)
def test_without_a_quota(tmp_path: Path, files: dict[str, str]) -> None:
    assert processors(made(tmp_path, files), [0]).quota is None


def test_without_sysfs_each_processor_is_a_core_of_one_node(tmp_path: Path) -> None:
    assert processors(tmp_path, [3, 5]) == Processors(2, 2, (0,))


def test_affinity_counts_as_it_is_now() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert (processors().count, processors().busy_threads) == (1, 1)
    finally:
        os.sched_setaffinity(0, before)
    assert processors().count == len(before)
