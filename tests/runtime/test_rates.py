"""What a choice of activations is weighed with: measured once, or taken from what was measured before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from zinf_fx.frontend import capture
from zinf_fx.frontend.explain import plan_model
from zinf_fx.machine import rates
from zinf_fx.plan.rates import NOMINAL
from zinf_fx.runtime.disk.measure import Profile, store_profile

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates._disk.cache_clear()


def test_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rates.measured(CPU, torch.float32, "nvme", (tmp_path,))
    assert min(found.flops, found.memory, found.read, found.write) > 1e6 and found.unified
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"], "nothing is left behind"
    monkeypatch.setattr(rates, "disk_rates", None)
    assert rates.measured(CPU, torch.float32, "nvme", (tmp_path,)) == found


def test_what_bench_io_stored_is_taken(tmp_path: Path) -> None:
    store_profile(tmp_path, Profile(5e6, 4e6, 3e6, "libaio", 8, 1 << 22, time.time()))
    found = rates.measured(CPU, torch.float32, "nvme", (tmp_path,))
    assert (found.read, found.write) == (found.disk_read, found.disk_write) == (5e6, 4e6)
    found = rates.measured(CPU, torch.float32, "host", (tmp_path,))  # where something else lives on the disk
    assert (found.disk_read, found.disk_write) == (5e6, 4e6) and found.read == found.write == found.memory / 2


def test_host_memory_needs_no_disk() -> None:
    found = rates.measured(CPU, torch.float32, "host", ())
    assert found.read == found.write == found.memory / 2
    assert (found.disk_read, found.disk_write) == (NOMINAL.disk_read, NOMINAL.disk_write)


@pytest.mark.parametrize(("states", "looked_at"), [("nvme", True), ("host", False)])
def test_a_choice_for_host_memory_knows_the_disk_that_states_live_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str, looked_at: bool
) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(capture, "measured", lambda *arguments: asked.append(arguments) or NOMINAL)
    placement = {"parameters": states, "gradients": states, "optimizer": states, "activations": "host"}
    options = {"placement": placement, "store": tmp_path, "activations": "auto", "device_memory": "1GiB"}
    plan_model(torch.nn.Linear(8, 8), (torch.randn(2, 8),), **options)
    assert asked == [(CPU, torch.float32, "host", (tmp_path,) if looked_at else ())]
