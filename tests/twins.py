"""A plain model and its twin on disk, and what must hold between them."""

from __future__ import annotations

import copy
import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import zinf_fx
from zinf_fx.runtime.execute.executor import EXECUTOR


class Net(nn.Module):
    """Has a few layers; `hook` is called between them, inside or outside of the captured graph."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.unused = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.hook = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.hook is not None:
                x = self.hook(x)
        return (x * self.scale).square().sum()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Net, Net]:
    """Return a plain model, and its twin on disk."""
    torch.manual_seed(0)
    plain = Net()
    return plain, zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme")


def python_calls(function: Callable[[], object]) -> int:
    """Return how many Python functions are called."""
    return sum(python_calls_by_name(function).values())


def python_calls_by_name(function: Callable[[], object]) -> Counter[str]:
    """Return how often each Python function is called."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad.full_tensor(), q.grad), name


def assert_nothing_leaked(model: Net) -> None:
    """No buffer of the host arena is in use once writes are done and nothing is expected."""
    EXECUTOR.reset()
    tiers = model.scale.stored.tiers
    tiers.drain()
    gc.collect()
    assert tiers.host.in_use == 0


def x(rows: int = 3) -> Tensor:
    return torch.randn(rows, 32)
