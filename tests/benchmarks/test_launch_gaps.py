"""benchmarks/launch_gaps.py runs on one layer, whose memory nobody touches."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import launch_gaps
import linear_layers
from launch_queue import Launch

from zinf_fx.plan.hardware import load


def launch(free: float, ready: float, start: float, end: float) -> Launch:
    return Launch("mm", start, free, ready, start, end, ())


def test_waiting_is_divided_by_what_for():
    """The device is free from 1 on, the program begins at 2; a copy comes at 5, and the second launch 1.5 late."""
    launches = [launch(1, 5, 5, 6), launch(6, 6, 7.5, 9), launch(9, 9.5, 9.5, 10)]
    measured = launch_gaps.Pass("forward", launches, 2, 3.0, {})
    assert (measured.kernels, measured.seconds) == (3, 8)
    assert (measured.awaiting_copies, measured.awaiting_program) == (3.5, 1.5)
    assert measured.busy == pytest.approx(3 / 4.5)
    awaited = [(4.0, 5.5), (6.5, 7.25)]  # the optimizer, in part while a copy came
    measured = launch_gaps.Pass("forward", launches, 2, 3.0, {}, awaited)
    assert (measured.awaiting_copies, measured.awaiting_optimizer, measured.awaiting_program) == (3.5, 0.75, 0.75)


def test_a_device_of_a_node_has_its_share():
    node = load("dgx-h100")
    share = launch_gaps.one_device(node)
    assert share.ranks == 1 and share.device == node.device
    assert 8 * share.nvme.read == node.nvme.read and 8 * share.host.write == node.host.write


def options(**given: object) -> Namespace:
    """Return the options of one layer and one step."""
    few = {"layers": 1, "batch": 1, "sequence": 128, "warm": 1, "steps": 1}
    return Namespace(**{"residency": False, "profile": False, "optimizer": None, **few, **given})


@pytest.mark.slow
def test_an_optimizer_in_host_memory(tmp_path: Path):
    hardware = launch_gaps.one_device(load("dgx-h100"))
    args = options(store=tmp_path, warm=2, optimizer="after-backward")
    ((forward, backward),), _ = launch_gaps.run("infinity-cpu", args, hardware)
    parameters = 2 * 128256 * 4096 + 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
    # Two of bf16, and three of fp32; what the update keeps of them in fp32 passes through the cache, in truth.
    update = hardware.host.seconds(16 * parameters, 14 * parameters)
    assert 0.9 * update < forward.waited["the optimizer"] < 4 * update
    assert not backward.waited.get("the optimizer")


@pytest.mark.slow
def test_real_updates_go_on_beside_the_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_layers, "WIDTH", 64)
    with (updates := launch_gaps.RealUpdates(64 * 64 + 1, str(tmp_path))):
        hardware = launch_gaps.one_device(load("dgx-h100"))
        ((forward, backward),), _ = launch_gaps.run(
            "infinity-cpu", options(store=tmp_path), hardware, time.perf_counter
        )
    assert forward.launches and backward.launches
    assert forward.program > 0 and updates.rate > 0


def test_a_step_that_reads_from_a_disk(tmp_path: Path):
    args = options(store=tmp_path)
    hardware = launch_gaps.one_device(load("dgx-h100"))
    ((forward, backward),), predicted = launch_gaps.run("infinity-nvme", args, hardware)
    read = 2 * (2 * 128256 * 4096 + 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) / hardware.nvme.read
    for measured in (forward, backward):
        assert measured.kernels < measured.seconds and 0 < len(measured.launches) * hardware.launch < measured.program
        row = launch_gaps.row("infinity-nvme", [measured], predicted[measured.kind])
        assert row["pass"] == measured.kind and row["simulated s"] > 0
    # The table of tokens is read in the pass before.
    assert read / 3 < forward.waited["reads"] < forward.awaiting_copies + forward.program < 1.5 * read
    assert predicted["forward"] == pytest.approx(read, rel=0.2)
