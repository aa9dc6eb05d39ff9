"""FullyShardedDataParallel around stored parameters leaves them alone, and divides what is beside them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gate import slow
from ranks.launching import on_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import zinf_fx


def built() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 4))


def train(rank: int, ranks: int, everything: bool, use_orig_params: bool, ignored: bool) -> None:
    """Two steps, which are those of plain PyTorch over the batches of all ranks."""
    if ranks == 1:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    plain, model = built(), built()
    zinf_fx.offload(model if everything else model[1], placement="nvme")
    options = {"ignored_modules": [model[1]]} if ignored else {}
    run = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"), **options)
    stored = [parameter for parameter in run.parameters() if isinstance(parameter, zinf_fx.StoredTensor)]
    others = [parameter for parameter in run.parameters() if not isinstance(parameter, zinf_fx.StoredTensor)]
    beside = 0 if everything else sum(p.numel() for layer in (plain[0], plain[2]) for p in layer.parameters())
    assert len(stored) == (8 if everything else 4)
    assert ranks > 1 or sum(parameter.numel() for parameter in others) == beside
    optimizers = [zinf_fx.optim.SGD(stored, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)]
    optimizers += [torch.optim.SGD(others, lr=0.1)] if others else []
    batches = torch.randn(ranks, 4, 8)
    for _ in range(2):
        run(batches[rank]).square().mean().backward()
        sum(plain(x).square().mean() for x in batches).div(ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(run(batches[rank]), plain(batches[rank]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ranks", "everything", "use_orig_params", "ignored"),
    [
        *((1, False, use_orig_params, ignored) for use_orig_params in (False, True) for ignored in (False, True)),
        *(slow(2, everything, True, False) for everything in (False, True)),
    ],
)
def test_a_wrapper_trains_what_is_beside_them(ranks: int, everything: bool, use_orig_params: bool, ignored: bool):
    try:
        on_ranks(ranks, train, ranks, everything, use_orig_params, ignored)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
