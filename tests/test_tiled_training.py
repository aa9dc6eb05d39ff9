"""Tiled training equals untiled training, within fp32 rounding, and fits budgets that are smaller than one layer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from followed import followed_plans
from gate import slow
from ranks import training
from ranks.launching import on_ranks
from ranks.training import ROUNDING, Loop, adamw, differences
from torch.nn import functional as F
from twins import python_calls_by_name

import zinf_fx
from zinf_fx.errors import BudgetError, PlanError
from zinf_fx.runtime.gradients import backward

# So large that the optimizer doesn't blow up the rounding of gradients that are next to nothing.
EPSILON = 1e-4


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Linears(torch.nn.Module):
    """Has odd sizes: no tile begins at a block of the store."""

    def __init__(self, width: int = 37, inner: int = 111) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(x + self.down(torch.tanh(self.up(x))), target)


# Every placement, with and without a tied weight, and with one and with two micro-batches.
SLOWLY = adamw(lr=1e-3, eps=EPSILON)
ONE, TWO = Loop(4, optimizers=SLOWLY), Loop(4, micro_batches=2, optimizers=SLOWLY)
CLIPPING = Loop(3, micro_batches=2, clip=0.5, optimizers=adamw(eps=EPSILON))
RUNS = [
    slow(1, ["device", "infinity-nvme"], False, ONE),
    (1, ["nvme"], False, TWO),
    slow(1, ["host"], False, TWO),
    (1, ["device"], True, TWO),
    slow(1, ["nvme"], True, ONE),
    slow(4, ["zero-1", "zero-2", "zero-3", "infinity-cpu", "zero-offload"], True, CLIPPING),
]


@pytest.mark.parametrize(("size", "placements", "tied", "loop"), RUNS)
def test_equals_untiled(size: int, placements: list[str], tied: bool, loop: Loop) -> None:
    in_tiles = partial(differences, build=partial(training.model, tied=tied), tile=2500)
    for apart in on_ranks(size, in_tiles, placements, loop):
        assert len(apart) == len(placements) and max(apart) < ROUNDING


def linears() -> tuple[Linears, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Linears(), (torch.randn(5, 37), torch.randn(5, 37))


@pytest.mark.parametrize("count", [slow(1), 3, slow(16)])
def test_any_number_of_tiles(tmp_path: Path, count: int) -> None:
    plain, (x, target) = linears()
    model = zinf_fx.offload(Linears(), store=tmp_path, placement="nvme", tile=-(-111 // count) * 37 * 4)
    model.load_state_dict(plain.state_dict())
    with followed_plans(model) as plans:
        loss, expected = torch.compile(model, backend="zinf")(x, target), plain(x, target)
        loss.backward()
        expected.backward()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)
    tiles = [tile for tile in plans[0].graph("backward").tiles if tile.name == "up.weight"]
    assert len(tiles) == count


def test_forward_is_bitwise_where_the_output_is_tiled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, x = torch.nn.Linear(64, 256), torch.randn(32, 64)
    model = zinf_fx.offload(torch.nn.Linear(64, 256), store=tmp_path, placement="nvme", tile="16KiB")
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="zinf")(x), plain(x))


@pytest.mark.parametrize("gradients", ["nvme", slow("device")])
def test_a_layer_larger_than_the_budget(tmp_path: Path, gradients: str) -> None:
    """Untiled it is refused when it is planned; tiled it trains, and its tiles never take more than the budget."""
    torch.manual_seed(0)
    plain = Linears(256, 1024)
    x, target = torch.randn(4, 256), torch.randn(4, 256)
    plain(x, target).backward()
    in_flight = 600 << 10
    living = sum(p.nbytes + -p.nbytes % 4096 for p in plain.parameters()) if gradients == "device" else 0
    kept = (4 * 1024 + 4 * 256) * 4  # what tanh returns, and the sum that the loss is computed from
    placement = {"parameters": "nvme", "gradients": gradients, "optimizer": "nvme"}
    budget = in_flight + living + kept
    model = zinf_fx.offload(Linears(256, 1024), store=tmp_path, placement=placement, device_memory=budget)
    model.load_state_dict(plain.state_dict())
    with pytest.raises(BudgetError, match="and the budget is"):
        torch.compile(model, backend="zinf", options={"tile": None})(x, target)
    torch._dynamo.reset()
    tiers = model.up.weight.stored.tiers
    tiers.drain()
    tiers.host._space.peak = 0
    torch.compile(model, backend="zinf", options={"tile": "auto"})(x, target).backward()
    peak = tiers.host.peak
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)
    assert 0 < peak <= in_flight


def test_what_can_not_be_tiled_is_said(tmp_path: Path) -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.table.sin()).sum()

    with pytest.raises(PlanError, match=r"'table' can't be tiled: aten\.sin computes with it"):
        zinf_fx.explain(Sum(), torch.randn(64, 64), placement="nvme", tile="auto", device_memory="8KiB")


def test_the_tiles_of_a_graph_are_looked_through_once(tmp_path: Path) -> None:
    """However many parameters they are of."""
    model, batch = linears()
    zinf_fx.offload(model, store=tmp_path, placement="infinity-cpu", tile=2500)
    call, calls = torch.compile(model, backend="zinf"), []
    for _ in range(2):
        loss = call(*batch)
        calls.append(python_calls_by_name(loss.backward)["_starts"])
        model.zero_grad()
    assert calls == [1, 1]


def test_half_a_gradient_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, inputs = linears()
    model = zinf_fx.offload(Linears(), store=tmp_path, placement="nvme", tile=2500)
    model.load_state_dict(plain.state_dict())
    call = torch.compile(model, backend="zinf")
    arrive, calls = backward.accumulate, []

    def fail_later(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise InterruptedError
        arrive(*args, **kwargs)

    monkeypatch.setattr(backward, "accumulate", fail_later)
    with pytest.raises(InterruptedError):
        call(*inputs).backward()
    assert model.down.weight.grad is None
    monkeypatch.undo()
    call(*inputs).backward()
    plain(*inputs).backward()
    torch.testing.assert_close(model.down.weight.grad.full_tensor(), plain.down.weight.grad, rtol=1e-4, atol=1e-6)


def test_the_plan_shows_tiles() -> None:
    text = zinf_fx.explain(Linears(), torch.randn(5, 37), torch.randn(5, 37), placement="nvme", tile="8KiB")
    assert "tile 8.0 KiB" in text
    for part in ("up.weight[0:37]", "up.weight[37:74]", "up.weight[74:111]", "down.weight[13:26]"):
        assert part in text, text
