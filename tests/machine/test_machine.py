"""The measured description of this machine is whole, of the right sizes, and from the right measurements."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch.optim import Optimizer

from zinf_fx.adam import UpdateForm
from zinf_fx.errors import StoreError
from zinf_fx.machine import machine
from zinf_fx.machine.machine import measure_machine
from zinf_fx.native.engine import BLOCK, DEPTH
from zinf_fx.optim.formats import CODES, LOWER, MASTER
from zinf_fx.optim.kernels import Operands
from zinf_fx.plan.hardware import DTYPES
from zinf_fx.runtime.disk.filesystem import file_system_of
from zinf_fx.runtime.disk.measure import Profile, store_profile
from zinf_fx.runtime.memory.process import memory_limit
from zinf_fx.sizes import WINDOW_ALIGNMENT

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import default_dtype

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
    measured = measure_machine(store)
    assert (
        measured.ranks == 1 and set(measured.peak) == set(DTYPES) and all(peak > 0 for peak in measured.peak.values())
    )
    assert measured.device == measured.host and 2 * measured.host.capacity == pytest.approx(
        memory_limit().nbytes, abs=1
    )
    assert measured.upload == measured.download == measured.in_node == measured.between_nodes
    assert measured.upload.bandwidth == measured.host.read and 0 < measured.upload.latency < 1
    assert measured.nvme.read > 0 and measured.nvme.write > 0 and measured.nvme.endurance is None
    assert 0 < measured.nvme.capacity <= file_system_of(store).total
    assert not list(store.iterdir())


def test_a_stored_profile_stands_for_the_disk(tmp_path: Path):
    store_profile(tmp_path, PROFILE)
    measured = measure_machine(tmp_path)
    assert (measured.nvme.read, measured.nvme.write) == (PROFILE.read, PROFILE.write)


def test_computing_and_the_disk_slow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They do by as much as each takes longer beside the other; the median counts. A read takes 1 s, and a write 3
    s."""
    monkeypatch.setattr(machine, "_TIMES", 3)
    computing = iter((1.0, 1.25, 1.0, 9.0, 1.0, 1.25, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0))
    moving = iter((1.0, 2.0, 1.0, 9.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 3.0, 1.0))
    moved: list[str] = []

    def mean(work: Callable[[], object], device: torch.device) -> float:
        work()
        return next(moving if isinstance(work, partial) else computing)

    monkeypatch.setattr(machine.Trial, "__init__", lambda trial, *_, **__: None)
    monkeypatch.setattr(machine.Trial, "close", lambda trial: None)
    monkeypatch.setattr(machine.Trial, "run", lambda trial, kind: moved.append(kind) or time.sleep(0.001))
    monkeypatch.setattr(machine, "_mean", mean)
    monkeypatch.setattr(machine.Trial, "start_seconds", lambda trial, before, times: 1e-4)
    monkeypatch.setattr(machine, "_share_alone", lambda trial, before, meanwhile: 0.6)
    loads = machine.beside_computing(tmp_path)
    assert loads == {
        "read_load": 1 - 1 / 1.25,
        "write_load": 0.5,
        "start": 1e-4,
        "beside": (1 / 2 + 3 / 4) / 2,
        "alone": 0.6,
    }
    assert set(moved) == {"read", "write"} and moved == sorted(moved)


def test_the_share_of_a_block_alone_is_that_of_the_speed_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The median of what a block takes, by itself and with many: 4 s and 1 s, or less than with many."""
    monkeypatch.setattr(machine, "_TIMES", 3)
    alone, many = [9.0, 4.0, 4.0, 0.1, 0.1, 0.1], [1.0, 1.0, 7.0] * 2
    monkeypatch.setattr(
        machine.Trial,
        "block_seconds",
        lambda trial, together, times, *_: {1: alone, 2 * DEPTH: many}[together].pop(0),
    )
    assert machine.share_alone(tmp_path) == 1 / 4
    assert machine.share_alone(tmp_path) == 1


def test_computing_that_is_faster_beside_the_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken = iter((1.0, 1.0, 0.9, 0.8) * 2)  # computing and moving, and each beside the other
    monkeypatch.setattr(machine, "_mean", lambda work, device: next(taken))
    monkeypatch.setattr(machine, "_share_alone", lambda trial, before, meanwhile: 0.6)
    loads = machine.beside_computing(tmp_path)
    assert loads["read_load"] == loads["write_load"] == 0 and loads["beside"] == 1


def test_a_cpu_is_described_with_the_loads_of_its_disk_where_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loads = {"read_load": 0.1, "write_load": 0.2, "start": 1e-4, "beside": 0.9, "alone": 0.6}
    monkeypatch.setattr(machine, "beside_computing", lambda store: loads)
    monkeypatch.setattr(machine, "share_alone", lambda store: 0.9)
    nvme = measure_machine(tmp_path).nvme
    assert {name: getattr(nvme, name) for name in loads} == loads and (nvme.depth, nvme.block) == (DEPTH, BLOCK)
    without = machine._disks((tmp_path,), unified=False)
    assert (without.read_load, without.start, without.depth, without.alone) == (0, 0, DEPTH, 0.9)
    store_profile(tmp_path, PROFILE)
    monkeypatch.setattr(machine, "file_system_of", lambda store: SimpleNamespace(free=0))
    measured = measure_machine(tmp_path)
    disk = measured.nvme
    assert (disk.read, disk.read_load, disk.write_load, disk.start, disk.depth) == (PROFILE.read, 0, 0, 0, 1)


def test_rates_count_what_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every measurement takes half a second: a copy reads and writes each byte, a product has 2 n³ FLOP."""
    monkeypatch.setattr(machine, "_mean", lambda work, device: 0.5)
    store_profile(tmp_path, PROFILE)
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(machine, "update_threads", lambda *args, beside_gpu: given.append((*args, beside_gpu)) or 2)
    measured = measure_machine(tmp_path)
    assert given == [(None, torch.get_num_threads(), False)]
    assert measured.host.read == measured.host.write == 2 * (1 << 20) / 0.5
    assert set(measured.peak.values()) == {2 * 512**3 / 0.5}
    assert measured.upload.latency == 0.5
    assert measured.unified and measured.updates == dict.fromkeys(get_args(UpdateForm), WINDOW_ALIGNMENT / 0.5)
    assert measured.launch == 0
    assert machine.launch_seconds(torch.device("cpu")) == 0.5 / 1000


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_what_is_updated_is_fp32_whatever_the_default_dtype(
    default: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code writes so many bytes."""
    given: list[Operands] = []
    numbers: set[int] = set()

    def update(inner: Optimizer, operands: list[Operands], scratch: torch.Tensor, threads: int) -> None:
        given.extend(operands)
        numbers.add(threads)

    monkeypatch.setattr(machine, "update_elements", update)
    with default_dtype(default):
        machine.update_rates(3)
    assert numbers == {3}
    assert {values.dtype for operands in given for values in (operands.parameter, operands.gradient)} == {
        torch.bfloat16
    }
    masters = {operands.master[MASTER].dtype for operands in given}
    moments = {operands.states["exp_avg"].dtype for operands in given}
    assert masters == {torch.float32, LOWER} and moments == {torch.float32, torch.bfloat16, CODES}


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
