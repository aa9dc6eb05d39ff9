"""Parameters in tiles, each divided over the ranks, train as in DistributedDataParallel, in the plan's bytes."""

from __future__ import annotations

import pytest
import torch
from followed import followed_plans
from ranks.launching import on_ranks
from ranks.training import ROUNDING
from torch import nn
from torch.nn import functional as F

import zinf_fx
from zinf_fx.errors import BudgetError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.sharding import shards_of
from zinf_fx.plan.simulation.communication import communication

# So large that the optimizer doesn't blow up the rounding of gradients that are next to nothing.
EPSILON = 1e-4


class Wide(nn.Module):
    """Of which rows of 64 elements are in shards of whole blocks: an embedding that is the head, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(700, 64)
        self.up, self.down = nn.Linear(64, 300), nn.Linear(300, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), tokens.flatten())


def train(run: nn.Module, parameters: list, optimizer: torch.optim.Optimizer, rank: int, sent=lambda: 0) -> list[int]:
    """Return what `sent` says after each step."""
    generator = torch.Generator().manual_seed(rank)
    sent_bytes = []
    for _ in range(3):
        run(torch.randint(700, (2, 9), generator=generator)).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sent_bytes.append(sent())
    return sent_bytes


def from_disk(rank: int, replicas: int) -> tuple[float, int, int, int, int]:
    """Return the largest difference to DistributedDataParallel; bytes sent in a step, and planned; how many tiles the
    largest parameter has; and bytes by which the host arena took more than planned."""
    size = torch.distributed.get_world_size()
    plain = Wide()
    train(
        nn.parallel.DistributedDataParallel(plain),
        list(plain.parameters()),
        torch.optim.AdamW(plain.parameters(), 1e-3, eps=EPSILON, fused=True),
        rank,
    )
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (replicas, size // replicas))
    options = {"placement": "nvme", "tile": "32KiB", "residency": False, "prefetch": None}
    model = zinf_fx.offload(Wide(), mesh=mesh, **options)
    held = {name: parameter.to_local().numel() for name, parameter in model.named_parameters()}
    if replicas == 1:
        assert held["tokens.weight"] < 700 * 64 * 0.8
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-3, eps=EPSILON)
    run = torch.compile(model, backend="zinf")
    with followed_plans(model) as plans:
        sent = train(run, list(model.parameters()), optimizer, rank, lambda: zinf_fx.stats(model).sent_bytes)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    difference = max((mine.full_tensor() - theirs).abs().max().item() for mine, theirs in pairs)
    (plan,) = plans
    tiles = [tile for tile in plan.graph("backward").tiles if tile.name == "tokens.weight"]
    assert max(tile.gathered_nbytes for tile in tiles) <= 32 << 10  # never is all of it on one rank
    planned = sum(collective.total for collective in communication(plan))
    stats = zinf_fx.stats(model)
    return difference, sent[2] - sent[1], planned, len(tiles), stats.peak_host_bytes - stats.planned_host_bytes


def test_tiles_are_found_that_fit_a_budget():
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    options = {"placement": "nvme", "prefetch": None, "world_size": 2}
    with pytest.raises(BudgetError):
        plan_model(Wide(), (tokens,), device_memory="300KiB", tile=None, **options)
    (plan,) = plan_model(Wide(), (tokens,), device_memory="300KiB", **options).plans
    tiles = [tile for tile in plan.graph("backward").tiles if tile.name == "tokens.weight"]
    assert len(tiles) > 1 and sum(tile.shape[0] for tile in tiles) == 700
    whole = shards_of((700, 64), torch.float32, 2, zinf_fx.Config(tile=1, placement="nvme"))
    assert sum(tile.shard for tile in tiles) == whole.size
    assert all(tile.gathered_nbytes < 700 * 64 * 4 / 2 for tile in tiles)


def test_two_ranks_train_in_tiles_as_distributed_data_parallel():
    for difference, sent, planned, tiles, over in on_ranks(2, from_disk, 1):
        assert difference < ROUNDING and sent == planned and tiles > 4 and over <= 0


def on_four(rank: int) -> tuple:
    return from_disk(rank, 1), from_disk(rank, 2)


@pytest.mark.slow
def test_four_ranks_train_in_tiles_as_distributed_data_parallel():
    for disk in on_ranks(4, on_four):
        for difference, sent, planned, tiles, over in disk:
            assert difference < ROUNDING and sent == planned and tiles > 4 and over <= 0
