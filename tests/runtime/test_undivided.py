"""FullyShardedDataParallel around stored parameters."""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import zinf_fx
from zinf_fx.errors import StoredTensorError


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    """Stored, on the only rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield zinf_fx.offload(nn.Linear(8, 8), store=tmp_path, placement="nvme")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_wrapper_that_would_divide_them_is_refused(model: nn.Module, use_orig_params):
    before = model.weight.full_tensor()
    with pytest.raises(StoredTensorError, match="FullyShardedDataParallel would have the values of stored parameters"):
        FullyShardedDataParallel(
            nn.Sequential(nn.Linear(8, 8), model), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
    assert torch.equal(model.weight.full_tensor(), before)


@pytest.mark.filterwarnings("ignore")
def test_a_wrapper_that_ignores_them_trains_what_is_beside_them(model: nn.Module):
    beside = nn.Linear(8, 8)
    run = FullyShardedDataParallel(
        nn.Sequential(beside, model), ignored_modules=[model], use_orig_params=True, device_id=torch.device("cpu")
    )
    run(torch.ones(2, 8)).sum().backward()
    assert beside.weight.grad is not None and isinstance(model.weight.grad, zinf_fx.StoredTensor)


def test_whoever_asks_from_outside_of_any_function_is_answered(tmp_path: Path) -> None:
    """As at a script's top level: nobody has called who asks."""
    model = zinf_fx.offload(nn.Linear(8, 8), store=tmp_path, placement="nvme")
    answers: list[bool] = []
    answered = _thread.allocate_lock()
    answered.acquire()

    def ask() -> None:
        with contextlib.suppress(ValueError):
            answers.append(model.weight._fsdp_flattened)
        answered.release()

    _thread.start_new_thread(ask, ())
    assert answered.acquire(timeout=60) and answers == [False]
