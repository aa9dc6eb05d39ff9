"""Collectives of NCCL, with the one rank that one GPU has: what they give, and training with them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zinf_fx
from zinf_fx.config import Config
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = "cuda"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    device = torch.device(CUDA, 0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, device_id=device)
    yield dist.group.WORLD
    EXECUTOR.reset()
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_collectives_give_what_the_rank_has(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    ranks = Ranks.of(Config(process_group=group, placement="zero-3"))
    shard = torch.arange(-2000, 2000, device=CUDA).to(dtype)
    full, sums = torch.zeros_like(shard), torch.zeros_like(shard)
    ranks.all_gather(full, shard, "a tile").wait()
    assert torch.equal(full, shard)
    ranks.all_gather(full, full, "a tile in its place").wait()
    assert torch.equal(full, shard)
    ranks.reduce_scatter(sums, full, "its gradient").wait()
    assert torch.equal(sums, shard)
    assert ranks.sent_bytes == 0


def test_collectives_follow_what_is_queued(group: dist.ProcessGroup) -> None:
    """The program runs ahead, and what it queues behind a collective follows it there."""
    ranks = Ranks.of(Config(process_group=group, placement="zero-3"))
    shard = torch.zeros(1 << 20, device=CUDA)
    full = torch.empty_like(shard)
    ranks.all_gather(full, shard, "what makes a communicator").wait()
    full.mul_(2)  # its kernel is loaded, for which the driver may wait until the device is idle
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    shard.fill_(3)
    ranks.all_gather(full, shard, "a tile").wait()
    sums = full.mul_(2)
    assert not torch.cuda.current_stream().query()
    assert torch.equal(sums, torch.full_like(sums, 6))


def test_a_long_collective_is_named(tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks.of(Config(process_group=group, placement="zero-3", collective_timeout=2.0))
    shard = torch.zeros(8, device=CUDA)
    torch.cuda._sleep(1_500_000_000)  # 0.8 s or so, and a tenth of the time-out is waited for patiently
    with caplog.at_level(logging.WARNING, "zinf_fx"):
        ranks.all_gather(torch.empty_like(shard), shard, "the tile of 'head.weight'").wait()
        torch.cuda.synchronize()
    assert "head.weight" in caplog.text


@pytest.mark.parametrize("placement", ["zero-3", "zero-offload", "infinity-nvme"])
def test_one_rank_trains_as_plain_pytorch(tmp_path: Path, group: dist.ProcessGroup, placement: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4))).to(CUDA)
    stored = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement=placement, process_group=group)
    run = torch.compile(stored, backend="zinf", options={"compute": "eager"})
    losses: list[list[float]] = []
    for call, optimizer in (
        (plain, torch.optim.SGD(plain.parameters(), lr=0.5)),
        (run, zinf_fx.optim.SGD(stored.parameters(), lr=0.5)),
    ):
        torch.manual_seed(1)
        losses.append([])
        for _ in range(4):
            loss = call(torch.randn(6, 48, device=CUDA)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == (losses[0] if placement == "zero-3" else pytest.approx(losses[0], rel=1e-5))
    assert losses[0][-1] < losses[0][0]
