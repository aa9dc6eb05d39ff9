"""What a choice of activations is weighed with: measured once, or taken from what was measured before."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zinf_fx.config import Config
from zinf_fx.frontend import auto_placement, capture
from zinf_fx.frontend.explain import plan_model
from zinf_fx.machine import machine, rates
from zinf_fx.passes.ir.framework import GraphContext
from zinf_fx.plan.hardware import load
from zinf_fx.plan.rates import NOMINAL, Rates
from zinf_fx.runtime.disk.filesystem import file_system_of
from zinf_fx.runtime.disk.measure import Profile, store_profile

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates._disks.cache_clear()


def test_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = rates.measured(CPU, torch.float32, "nvme", (tmp_path,), 1)
    assert min(measured.flops, measured.memory, measured.read, measured.write) > 1e6 and measured.unified
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"], "nothing is left behind"
    monkeypatch.setattr(rates, "disk_rates", None)
    assert rates.measured(CPU, torch.float32, "nvme", (tmp_path,), 1) == measured


def test_what_bench_io_stored_is_taken(tmp_path: Path) -> None:
    store_profile(tmp_path, Profile(5e6, 4e6, 3e6, "libaio", 8, 1 << 22, time.time()))
    rate = rates.measured(CPU, torch.float32, "nvme", (tmp_path,), 1)
    assert (rate.read, rate.write) == (rate.disk_read, rate.disk_write) == (5e6, 4e6)
    rate = rates.measured(CPU, torch.float32, "host", (tmp_path,), 1)  # where something else lives on the disk
    assert (rate.disk_read, rate.disk_write) == (5e6, 4e6) and rate.read == rate.write == rate.memory / 2


def profiled(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories of a device that reads 5 MB per second, and writes 4."""
    stores = tmp_path / "a", tmp_path / "b"
    for store in stores:
        store.mkdir()
    store_profile(tmp_path, Profile(5e6, 4e6, 3e6, "libaio", 8, 1 << 22, time.time()))
    return stores


@pytest.mark.parametrize("devices", [1, 2])
def test_rates_of_several_devices_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    stores = profiled(tmp_path)
    if devices == 2:
        for module in (machine, auto_placement):
            monkeypatch.setattr(module, "one_per_device", list)
    expected = (devices * 5e6, devices * 4e6)
    measured = rates.measured(CPU, torch.float32, "nvme", stores, 1)
    assert (measured.disk_read, measured.disk_write) == expected
    disks = auto_placement.this_machine(Config(store=stores), CPU).nvme
    assert (disks.read, disks.write) == expected
    monkeypatch.setattr(machine, "_DISK_BYTES", 0)
    monkeypatch.setattr(machine, "beside_computing", lambda store: {})
    disks = machine._disks(stores, unified=True)
    assert (disks.read, disks.write) == expected
    assert disks.capacity == pytest.approx(devices * file_system_of(tmp_path).free, rel=0.1)


@pytest.mark.parametrize(("ranks", "sharing"), [(1, 1), (2, 2), (16, 4)])
def test_the_ranks_of_a_machine_share_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, sharing: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    measured = rates.measured(CPU, torch.float32, "nvme", profiled(tmp_path), ranks)
    assert (measured.disk_read, measured.disk_write) == (5e6 / sharing, 4e6 / sharing)


def test_host_memory_needs_no_disk() -> None:
    measured = rates.measured(CPU, torch.float32, "host", (), 1)
    assert measured.read == measured.write == measured.memory / 2
    assert (measured.disk_read, measured.disk_write) == (NOMINAL.disk_read, NOMINAL.disk_write)


@pytest.mark.parametrize(("states", "looked_at"), [("nvme", True), ("host", False)])
def test_a_choice_for_host_memory_knows_the_disk_that_states_live_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str, looked_at: bool
) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(capture, "measured", lambda *arguments: asked.append(arguments) or NOMINAL)
    placement = {"parameters": states, "gradients": states, "optimizer": states, "activations": "host"}
    options = {"placement": placement, "store": tmp_path, "activations": "auto", "device_memory": "1GiB"}
    plan_model(torch.nn.Linear(8, 8), (torch.randn(2, 8),), **options)
    assert asked == [(CPU, torch.float32, "host", (tmp_path,) if looked_at else (), 1)]


@pytest.mark.parametrize(
    ("first", "peak", "dtype"),
    [
        (torch.int8, {}, "float32"),
        (torch.float64, {}, "float32"),
        (torch.float16, {}, "float32"),
        (torch.int8, {"peak": {"float16": 1e12}}, "float16"),
    ],
    ids=str,
)
def test_choices_for_a_described_machine_are_weighed_with_its_rates(
    monkeypatch: pytest.MonkeyPatch, first: torch.dtype, peak: dict[str, object], dtype: str
) -> None:
    """Those of the dtype that most elements have, of those that it has a peak for."""
    described, taken = replace(load("a100"), **peak), []
    noting = lambda *given, **named: taken.append(named["rates"]) or GraphContext(*given, **named)  # noqa: E731
    monkeypatch.setattr(capture, "GraphContext", noting)
    model = torch.nn.Linear(8, 8)
    model.offset = torch.nn.Parameter(torch.zeros(8, dtype=first), requires_grad=False)
    options = {"placement": "host", "activations": "auto", "device_memory": "1GiB"}
    plan_model(model, (torch.randn(2, 8),), hardware=described, **options)
    assert taken == [Rates.of(described, dtype, "host")]
