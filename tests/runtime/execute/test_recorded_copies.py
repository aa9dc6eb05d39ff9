"""Recordings on a device whose copies come late: what waits for a copy is still of the tile that was copied."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from runtime.late_device import install
from torch import nn

import zinf_fx
from zinf_fx.runtime.execute.executor import EXECUTOR


def test_writes_that_wait_for_a_copy_are_of_what_was_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch)
    torch._dynamo.reset()
    layers = [nn.Linear(64, 64) for _ in range(3)]
    model = zinf_fx.offload(nn.Sequential(*layers), store=tmp_path, placement="nvme", pack="32KiB")
    compiled = torch.compile(model, backend="zinf")
    optimizer = zinf_fx.optim.AdamW(model.parameters())

    def step() -> None:
        compiled(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.finish()
        optimizer.zero_grad()

    step()
    with zinf_fx.record(compiled) as recording:
        step()
    (recorded,) = recording.steps
    written = Counter(span.name for span in recorded.slices if span.lane == "offload")
    (plan,) = recording.plans
    assert len(plan.tiles) == 3 and written == Counter(f"write {tile.label}" for tile in plan.tiles)
    assert {span.name for span in recorded.slices if span.lane == "optimizer"} == {
        "read_states",
        "update",
        "write_states",
    }
    EXECUTOR.reset()
