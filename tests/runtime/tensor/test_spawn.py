"""A stored model that is given to a process of torch.multiprocessing arrives there as an ordinary one."""

from __future__ import annotations

import io
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import nn

import zinf_fx


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)
        self.other = nn.Linear(64, 64, bias=False)
        self.other.weight = self.one.weight
        self.one.bias.requires_grad_(False)


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    torch.manual_seed(0)
    return zinf_fx.offload(Tied(), store=tmp_path, placement="nvme")


def check(model: nn.Module) -> None:
    torch.manual_seed(0)
    expected = Tied()
    assert model.other.weight is model.one.weight
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert type(p) is nn.Parameter and torch.equal(p, q) and p.requires_grad == q.requires_grad, name


class SpawningPopen:
    """What stands for the child while objects are pickled for it: a descriptor that it is given must stay open."""

    def duplicate_for_child(self, fd: int) -> int:
        raise AssertionError("the memory of a value that is gone before the child begins is shared with it")


def test_a_value_for_a_spawned_process_is_sent(model: nn.Module) -> None:
    file = io.BytesIO()
    set_spawning_popen(SpawningPopen())
    try:
        ForkingPickler(file).dump(model)
    finally:
        set_spawning_popen(None)
    check(ForkingPickler.loads(file.getvalue()))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_model_given_to_a_process(model: nn.Module, method: str) -> None:
    process = multiprocessing.get_context(method).Process(target=check, args=(model,))
    process.start()
    process.join()
    assert process.exitcode == 0
