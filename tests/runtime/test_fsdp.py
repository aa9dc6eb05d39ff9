"""FullyShardedDataParallel around stored parameters leaves them alone, and divides what is beside them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import zinf_fx


@pytest.fixture(autouse=True)
def only_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("ignored", [False, True], ids=["found", "ignored"])
def test_a_wrapper_trains_what_is_beside_them(tmp_path: Path, use_orig_params: bool, ignored: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = copy.deepcopy(plain)
    zinf_fx.offload(model[1], store=tmp_path, placement="nvme")
    options = {"ignored_modules": [model[1]]} if ignored else {}
    run = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"), **options)
    stored = [one for one in run.parameters() if isinstance(one, zinf_fx.StoredTensor)]
    others = [one for one in run.parameters() if not isinstance(one, zinf_fx.StoredTensor)]
    assert len(stored) == 2 and sum(one.numel() for one in others) == 8 * 8 + 8
    optimizers = [zinf_fx.optim.SGD(stored, lr=0.1), torch.optim.SGD(others, lr=0.1)]
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    for _ in range(2):
        run(x).square().sum().backward()
        plain(x).square().sum().backward()
        for optimizer in (*optimizers, expected):
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(run(x), plain(x))
