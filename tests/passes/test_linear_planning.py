"""What planning costs grows with the number of parameters, and not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, fx, nn

import zinf_fx
from zinf_fx.config import Config
from zinf_fx.frontend.explain import plan_model
from zinf_fx.passes.activations.choose import PricedSegment, cheapest
from zinf_fx.passes.ir import framework
from zinf_fx.passes.ir.framework import GraphContext, TileKey
from zinf_fx.passes.tiling.tile import divided
from zinf_fx.plan.rates import NOMINAL
from zinf_fx.plan.schedule import Tile

PACKAGE = str(Path(zinf_fx.__file__).parent)
WIDTH = 8
COUNTS = (2, 4, 8)  # of linear layers, so that two steps, of which the second is twice the first, show a bend
BEND = 1.05


class Experts(nn.Module):
    """`count` linear layers of which every two are averaged."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.experts), 2):
            x = x + torch.stack([self.experts[first + number](x) for number in range(2)]).mean(0)
        return x.square().mean()


def calls_in(work: Callable[[], object]) -> int:
    """Return how many calls of zinf_fx's functions `work` makes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def check_linear(calls: list[int]) -> None:
    """Check numbers of calls for `COUNTS` layers: what they grow by shows no more than a line."""
    first, second = (after - before for before, after in pairwise(calls))
    assert 0 < second <= 2 * BEND * first, f"{dict(zip(COUNTS, calls, strict=True))} calls for so many layers"


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "pack"), [("nvme", None), ("infinity-nvme", "auto")])
def test_planning(placement: str, pack: str | None) -> None:
    def calls(count: int) -> int:
        model, batch = Experts(count), torch.randn(2, WIDTH)
        torch.compiler.reset()
        return calls_in(lambda: plan_model(model, (batch,), placement=placement, pack=pack))

    calls(COUNTS[0])  # what only the first of all does
    check_linear([calls(count) for count in COUNTS])


def test_planning_within_budgets() -> None:
    """Where buffers are placed, and it is decided what stays in memory."""

    def calls(count: int) -> int:
        model, batch = Experts(count), torch.randn(2, WIDTH)
        torch.compiler.reset()
        limits = {"device_memory": "1MiB", "host_memory": "1MiB"}
        return calls_in(lambda: plan_model(model, (batch,), placement="infinity-nvme", pack=None, **limits))

    calls(COUNTS[0])
    check_linear([calls(count) for count in COUNTS])


def test_finding_the_tiles_of_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its key made once, however often it is looked for."""
    made = []
    monkeypatch.setattr(framework, "TileKey", lambda *given: made.append(given) or TileKey(*given))
    whole = Tile("up.weight", (64, 64), torch.float32, "nvme", "nvme")
    tiles = divided(whole, 4 * 64 * 4)
    context = GraphContext("forward", Config(), {"up": whole}, divided={"up": tiles})
    assert [context.tile(key) for key in context.keys] == [*context.table] == [*tiles]
    assert len(made) == len(tiles) == 16


def test_choosing_what_leaves() -> None:
    """Segments save 16 activations each, of which most leave."""
    calls = []
    for count in COUNTS:
        parts = []
        for _ in range(count):
            graph = fx.Graph()
            saved = {graph.placeholder(f"x{number}"): 1 << 20 for number in range(16)}
            parts.append(PricedSegment(saved, dict([next(iter(saved.items()))]), seconds=1e3))
        calls.append(calls_in(lambda parts=parts: cheapest(parts, 8 << 20, NOMINAL, idle=0.0, and_last=False)))
    check_linear(calls)
