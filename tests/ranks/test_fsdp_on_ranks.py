"""FullyShardedDataParallel on two ranks divides what is beside stored parameters, which are divided already."""

from __future__ import annotations

import pytest
import torch
from launching import on_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import zinf_fx


def build() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 4))


def trained(rank: int, everything: bool) -> bool:
    """Whether two steps are those of plain PyTorch over the batches of both ranks."""
    plain, model = build(), build()
    zinf_fx.offload(model if everything else model[1], placement="nvme")
    run = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    stored = [one for one in run.parameters() if isinstance(one, zinf_fx.StoredTensor)]
    others = [one for one in run.parameters() if not isinstance(one, zinf_fx.StoredTensor)]
    optimizers = [zinf_fx.optim.SGD(stored, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)]
    optimizers += [torch.optim.SGD(others, lr=0.1)] if others else []
    batches = torch.randn(2, 4, 8)
    for _ in range(2):
        run(batches[rank]).square().mean().backward()
        sum(plain(x).square().mean() for x in batches).div(2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return torch.equal(run(batches[rank]), plain(batches[rank]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("everything", [True, False])
def test_stored_parameters_are_left_alone(everything: bool) -> None:
    assert on_ranks(2, trained, everything) == [True, True]
