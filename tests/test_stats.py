"""Counters say what a step moved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from followed import followed_plans
from gate import slow
from torch import nn

import zinf_fx
from zinf_fx.observe.stats import Stats
from zinf_fx.plan.memory.accounting import Traffic, phases
from zinf_fx.runtime.execute.executor import EXECUTOR


@pytest.fixture(autouse=True)
def nothing_anticipated() -> Iterator[None]:
    yield
    EXECUTOR.reset()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 16))


def settled(compiled: nn.Module) -> Stats:
    """Return the counters once nothing is under way: a step starts reads for the next."""
    before = None
    while before != (before := zinf_fx.stats(compiled)):
        time.sleep(0.05)
    return before


def test_a_model_in_memory_has_zeros():
    stats = zinf_fx.stats(model())
    assert stats == zinf_fx.stats(torch.compile(model())) and stats.provider is None
    assert {v for k, v in vars(stats).items() if k != "provider"} == {0}
    assert str(stats).startswith("no parameter of the model is stored, so nothing was counted: offload it")


FEWER = {"state_dtype": "8bit", "master_dtype": "split"}


@pytest.mark.parametrize(
    ("placement", "dtype", "states"),
    [slow("nvme", torch.bfloat16, {}), ("nvme", torch.bfloat16, FEWER), ("infinity-nvme", torch.float32, {})],
)
def test_a_step_moves_what_its_plan_says(tmp_path: Path, placement: str, dtype: torch.dtype, states: dict[str, str]):
    stored = zinf_fx.offload(model().to(dtype), store=tmp_path, placement=placement)
    compiled = torch.compile(stored, backend="zinf")
    # From a step in the background, forward takes what is on its way to the store, and reads less.
    optimizer = zinf_fx.optim.AdamW(compiled.parameters(), overlap=False, **states)
    x = torch.randn(8, 256, dtype=dtype)

    def step() -> None:
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with followed_plans(compiled) as plans:
        step()
        step()  # by now the order of graphs is known, and each starts the head of the next
    before = settled(compiled)
    for _ in range(4):
        step()
    after = settled(compiled)
    (plan,) = plans
    predicted = sum((moved for _, moved in phases(plan)), Traffic())
    assert (after.bytes_written - before.bytes_written) / 4 == pytest.approx(predicted.host_to_nvme, rel=0.02)
    assert (after.bytes_read - before.bytes_read) / 4 == pytest.approx(predicted.nvme_to_host, rel=0.05)


def test_every_counter_counts(tmp_path: Path):
    stored = zinf_fx.offload(model(), store=tmp_path, placement="nvme", prefetch=None)
    written = zinf_fx.stats(stored)
    nbytes = sum(p.nbytes for p in stored.parameters())
    assert written.bytes_written >= nbytes and written.write_seconds > 0 and written.provider
    compiled = torch.compile(stored, backend="zinf")
    compiled(torch.randn(8, 256)).sum().backward()
    next(stored.parameters()).stored.tiers.drain()  # counters stand still once nothing is under way
    stats = zinf_fx.stats(compiled)
    assert stats == zinf_fx.stats(stored)
    assert stats.bytes_read >= nbytes and stats.gathered_bytes >= nbytes
    assert stats.read_seconds > 0 and stats.stall_seconds > 0 and stats.write_stall_seconds >= 0
    assert stats.peak_host_bytes >= max(p.nbytes for p in stored.parameters()) and stats.host_bytes >= 0
    text = str(stats)
    assert f"I/O by {stats.provider}" in text and "NVMe -> host" in text and "MiB" in text
    with pytest.raises(AttributeError):
        stats.bytes_read = 0  # type: ignore[misc]
