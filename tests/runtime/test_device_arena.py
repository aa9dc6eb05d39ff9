"""On a device with memory of its own, tiles lie where their plan says, in one region that holds what the plan says."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from late_device import LateDevice, install
from planned_shapes import SHAPES
from torch import nn

import zinf_fx
from zinf_fx.explain import plans_of
from zinf_fx.plan.schedule import Plan
from zinf_fx.runtime.executor import EXECUTOR

TOLERANCE = 0.05


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """What stored tensors on the CPU compute on."""
    late = install(monkeypatch)
    torch._dynamo.reset()
    yield late
    torch._dynamo.reset()
    EXECUTOR.reset()
    gc.collect()


def plan_for(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Plan:
    (plan,) = plans_of(model, batch)
    return plan


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_predicted_peaks_are_the_measured_ones(tmp_path: Path, name: str, overlap: bool) -> None:
    shape = SHAPES[name]
    torch.manual_seed(0)
    model = zinf_fx.offload(shape.model(), store=tmp_path, **shape.options)
    plan = plan_for(model, shape.batch())
    compiled = torch.compile(model, backend="zinf")
    optimizer = zinf_fx.optim.AdamW(model.parameters(), overlap=overlap)
    for _ in range(4):
        compiled(*shape.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zinf_fx.stats(model)
    assert stats.planned_device_arena_bytes == plan.regions.device > 0
    assert stats.peak_device_arena_bytes == pytest.approx(plan.regions.device, rel=TOLERANCE), str(stats)
