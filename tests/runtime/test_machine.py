"""The measured description of this machine: whole, of the right sizes, and from the right measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zinf_fx.errors import StoreError
from zinf_fx.machine import machine
from zinf_fx.machine.machine import measure_machine
from zinf_fx.plan.hardware import DTYPES
from zinf_fx.runtime.disk.filesystem import file_system_of
from zinf_fx.runtime.disk.measure import Profile, store_profile
from zinf_fx.runtime.memory.limit import memory_limit
from zinf_fx.sizes import WINDOW_ALIGNMENT

PROFILE = Profile(read=3e9, write=6e9, mixed=4e9, provider="aio", depth=8, block=4 << 20, measured_at=1.0)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_COPIED", 1 << 20)
    monkeypatch.setattr(machine, "_DISK_BYTES", 16 << 20)
    monkeypatch.setattr(machine, "_WIDTH", 64)
    monkeypatch.setattr(machine, "QUICK_BYTES", 8 << 20)
    monkeypatch.setattr(machine, "_UPDATED", WINDOW_ALIGNMENT)
    monkeypatch.setattr(machine, "_SECONDS", 0.0)
    monkeypatch.setattr(machine, "_TIMES", 1)


def test_a_cpu_is_one_device_with_half_of_the_memory(tmp_path: Path):
    store = tmp_path / "store"
    store.mkdir()
    found = measure_machine(store)
    assert found.ranks == 1 and set(found.peak) == set(DTYPES) and all(peak > 0 for peak in found.peak.values())
    assert found.device == found.host and 2 * found.host.capacity == pytest.approx(memory_limit().nbytes, abs=1)
    assert found.upload == found.download == found.in_node == found.between_nodes
    assert found.upload.bandwidth == found.host.read and 0 < found.upload.latency < 1
    assert found.nvme.read > 0 and found.nvme.write > 0 and found.nvme.endurance is None
    assert 0 < found.nvme.capacity <= file_system_of(store).total
    assert not list(store.iterdir())


def test_a_stored_profile_stands_for_the_disk(tmp_path: Path):
    store_profile(tmp_path, PROFILE)
    found = measure_machine(tmp_path)
    assert (found.nvme.read, found.nvme.write) == (PROFILE.read, PROFILE.write)


def test_a_disk_loads_what_is_computed_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By so much as computing takes longer while the engine moves what it is told to; the median counts."""
    monkeypatch.setattr(machine, "_TIMES", 3)
    taken = iter((1.0, 1.25, 1.0, 9.0, 1.0, 1.25, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0))
    moved: list[str] = []
    run = machine.Trial.run
    monkeypatch.setattr(machine.Trial, "run", lambda trial, kind: moved.append(kind) or run(trial, kind))

    def mean(work: Callable[[], object], device: torch.device) -> float:
        work()
        before, seconds, began = len(moved), next(taken), time.monotonic()
        while seconds != 1.0 and len(moved) == before and time.monotonic() < began + 60:  # beside the disk
            time.sleep(0.001)
        return seconds

    monkeypatch.setattr(machine, "_mean", mean)
    monkeypatch.setattr(machine.Trial, "start_seconds", lambda trial, before, times: 1e-4)
    assert machine.disk_loads(tmp_path) == (1 - 1 / 1.25, 0.5, 1e-4)
    assert moved[0] == "write" and set(moved[1:]) == {"read", "write"}  # first the trial's file is made
    assert moved == [moved[0], *sorted(moved[1:])]


def test_the_latency_of_a_disk_is_what_a_read_alone_takes_besides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert machine.disk_latency(tmp_path, read=1e-3) == 0  # a disk whose blocks take an hour has none to speak of
    monkeypatch.setattr(machine.Trial, "alone_seconds", lambda trial, times: 0.003 + trial.block / 1e9)
    assert machine.disk_latency(tmp_path, read=1e9) == pytest.approx(0.003)
    monkeypatch.setattr(machine, "disk_latency", lambda store, read: read / PROFILE.read)
    store_profile(tmp_path, PROFILE)
    assert machine._disk(tmp_path, unified=False).latency == 1, "of the rate that the description has"


def test_computing_that_is_faster_beside_the_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken = iter((1.0, 0.9, 1.0, 0.9))
    monkeypatch.setattr(machine, "_mean", lambda work, device: next(taken))
    assert machine.disk_loads(tmp_path)[:2] == (0, 0)


def test_a_cpu_is_described_with_the_loads_of_its_disk_where_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "disk_loads", lambda store: (0.1, 0.2, 1e-4))
    found = measure_machine(tmp_path)
    assert (found.nvme.read_load, found.nvme.write_load, found.nvme.start) == (0.1, 0.2, 1e-4)
    without = machine._disk(tmp_path, unified=False)
    assert (without.read_load, without.start) == (0, 0)
    store_profile(tmp_path, PROFILE)
    monkeypatch.setattr(machine, "file_system_of", lambda store: SimpleNamespace(free=0))
    found = measure_machine(tmp_path)
    disk = found.nvme
    assert (disk.read, disk.read_load, disk.write_load, disk.start) == (PROFILE.read, 0, 0, 0)


def test_rates_count_what_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every measurement takes half a second: a copy reads and writes each byte, a product has 2 n³ FLOP."""
    monkeypatch.setattr(machine, "_mean", lambda work, device: 0.5)
    store_profile(tmp_path, PROFILE)
    found = measure_machine(tmp_path)
    assert found.host.read == found.host.write == 2 * (1 << 20) / 0.5
    assert set(found.peak.values()) == {2 * 512**3 / 0.5}
    assert found.upload.latency == 0.5
    assert found.unified and found.updates == found.codes == found.splits == WINDOW_ALIGNMENT / 0.5
    assert found.launch == 0
    assert machine.launch_seconds(torch.device("cpu")) == 0.5 / 1000


def test_the_mean_of_several_runs_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_TIMES", 3)
    now = [0.0]
    durations = iter((9.0, 5.0, 2.0, 5.0))  # the first is slow

    def work() -> None:
        now[0] += next(durations)

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    assert machine._mean(work, torch.device("cpu")) == 4.0


def test_a_store_that_isnt_there(tmp_path: Path):
    with pytest.raises(StoreError, match="gone"):
        measure_machine(tmp_path / "gone")
