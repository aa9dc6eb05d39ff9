"""On a device with memory of its own, whose copies come as late as they may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Job, assert_equal
from runtime.late_device import install

PLACEMENTS = [
    "device",
    "host",
    "nvme",
    {"parameters": "device", "gradients": "host", "optimizer": "nvme", "activations": "device"},
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Any):
    device = install(monkeypatch)
    first = Job(tmp_path / "a", seed=1, placement=placement)
    first.train(5)
    before = device.downloads, device.uploads
    first.save(tmp_path / "saved")
    assert (device.downloads > before[0]) == (placement == "device" or isinstance(placement, dict))
    assert device.uploads == before[1]
    losses = first.train(9)
    second = Job(tmp_path / "b", seed=2, placement=placement)
    second.load(tmp_path / "saved")
    assert second.train(9) == losses
    assert_equal(second.values(), first.values())
