"""What stays in memory is not read again, has the optimizer's last values, and goes with its model."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from followed import followed_plans
from gate import slow
from torch import nn

import zinf_fx
from zinf_fx.observe.stats import Stats
from zinf_fx.plan.memory.accounting import Traffic, phases
from zinf_fx.plan.plan import Plan
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.execute.tile_cache import TileCache

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    EXECUTOR.reset()


class Tied(nn.Module):
    """A table that is used at both ends, and layers of one size between."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 1024) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(1024, 128) for _ in range(3))
        self.norm = nn.LayerNorm(128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for up, down in zip(self.layers, self.down, strict=True):
            x = x + down(up(x).relu())
        return torch.nn.functional.cross_entropy(self.norm(x) @ self.tokens.weight.t(), tokens)


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def batch() -> torch.Tensor:
    return torch.randint(0, 512, (16,))


def optimizer_of(model: nn.Module, kind: type = zinf_fx.optim.AdamW) -> torch.optim.Optimizer:
    """One whose steps are over when they return, so that what they moved has been counted."""
    options = {"overlap": False} if kind is zinf_fx.optim.AdamW else {"fused": True}
    return kind(model.parameters(), lr=1e-2, **options)


def train(call: Callable, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = call(batch())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def settled(model: nn.Module) -> Stats:
    """Return the counters once nothing is under way: a step starts reads for the next."""
    before = None
    while before != (before := zinf_fx.stats(model)):
        time.sleep(0.05)
    return before


def bytes_per_step(model: nn.Module, steps: int = 4) -> tuple[float, float, Plan]:
    """Return bytes that a step reads and writes, once the order of graphs is known; and the plan."""
    compiled = torch.compile(model, backend="zinf")
    optimizer = optimizer_of(model)
    with followed_plans(model) as plans:
        train(compiled, optimizer, 2)
    (plan,) = plans
    before = settled(model)
    train(compiled, optimizer, steps)
    after = settled(model)
    return (
        (after.bytes_read - before.bytes_read) / steps,
        (after.bytes_written - before.bytes_written) / steps,
        plan,
    )


@pytest.mark.parametrize(
    ("placement", "budget"),
    [
        ("nvme", "1536KiB"),
        *(slow("nvme", size) for size in (None, "3MiB", "64MiB")),
        slow("infinity-nvme", "64MiB"),
    ],
)
def test_a_step_moves_exactly_what_its_plan_says_and_no_more_than_without(
    tmp_path: Path, budget: str | None, placement: str
) -> None:
    moved = {}
    for residency in (False, True):
        torch._dynamo.reset()
        options = {"placement": placement, "device_memory": budget, "residency": residency, "chunk": "64KiB"}
        options["pack"] = "auto" if budget else "64KiB"  # without a budget, packs of norms and biases stay
        model = zinf_fx.offload(tied(), store=tmp_path, **options)
        read, written, plan = bytes_per_step(model)
        predicted = sum((phase for _, phase in phases(plan)), Traffic())
        assert (read, written) == (predicted.nvme_to_host, predicted.host_to_nvme)
        moved[residency] = read + written
    assert moved[True] < moved[False]
    if budget == "64MiB":  # nothing but the optimizer reads parameters
        assert dict(phases(plan))["forward"].nvme_to_host == dict(phases(plan))["backward"].nvme_to_host == 0


@pytest.mark.parametrize(
    ("dtype", "budget"),
    [
        (torch.float32, "1536KiB"),
        *(slow(torch.float32, size) for size in (None, "3MiB", "64MiB")),
        slow(torch.bfloat16, "1536KiB"),
    ],
)
def test_training_is_bitwise_the_same(tmp_path: Path, budget: str | None, dtype: torch.dtype) -> None:
    models = [
        zinf_fx.offload(tied().to(dtype), store=tmp_path, placement="nvme", device_memory=budget, residency=residency)
        for residency in (False, True)
    ]
    losses = []
    for model in models:
        torch.manual_seed(1)
        losses.append(train(torch.compile(model, backend="zinf"), optimizer_of(model), 4))
    assert losses[0] == losses[1]
    for (name, parameter), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), other.full_tensor()), name


def test_whoever_writes_what_stays_sees_to_it(tmp_path: Path) -> None:
    """Eager writes, a state dict, and another graph between two calls."""
    plain = tied()
    model = zinf_fx.offload(tied(), store=tmp_path, placement="nvme", device_memory="64MiB")
    compiled, tokens = torch.compile(model, backend="zinf"), batch()
    for number in range(4):
        with torch.no_grad():
            assert torch.equal(compiled(tokens), plain(tokens))
            for net in (plain, model):
                net.norm.weight[:7].mul_(0.5)
                net.tokens.weight.add_(0.01)
        if number == 2:
            plain.load_state_dict({name: value * 0.9 for name, value in plain.state_dict().items()})
            model.load_state_dict(plain.state_dict())
        loss, expected = compiled(tokens), plain(tokens)
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        assert torch.equal(model.norm.weight.grad.full_tensor(), plain.norm.weight.grad)
        model.zero_grad()
        plain.zero_grad()


def test_what_stays_goes_with_its_model(tmp_path: Path) -> None:
    model = zinf_fx.offload(tied(), store=tmp_path, placement="nvme", device_memory="64MiB")
    tiers = model.norm.weight.stored.tiers
    with torch.no_grad():
        torch.compile(model, backend="zinf")(batch())
    assert tiers.host.in_use >= sum(p.nbytes for p in model.parameters())
    del model
    torch._dynamo.reset()
    gc.collect()
    assert tiers.host.in_use == 0


def test_another_plan_has_the_budget_for_itself(tmp_path: Path) -> None:
    model = zinf_fx.offload(tied(), store=tmp_path, placement="infinity-nvme", device_memory="3MiB")
    compiled = torch.compile(model, backend="zinf")
    optimizer = optimizer_of(model)
    for _ in range(3):
        train(compiled, optimizer, 1)
        with torch.no_grad():
            compiled(batch())
    EXECUTOR.reset()
    model.norm.weight.stored.tiers.drain()
    gc.collect()
    assert model.norm.weight.stored.tiers.host.in_use == 0


def test_the_plan_shows_what_stays() -> None:
    text = zinf_fx.explain(tied(), batch(), placement="nvme", device_memory="3MiB", chunk="64KiB")
    assert "keeps" in text and "in memory from step to step" in text
    off = zinf_fx.explain(tied(), batch(), placement="nvme", device_memory="3MiB", residency=False)
    assert "keeps" not in off and "in memory from step to step" not in off


@pytest.mark.parametrize(("placement", "tile"), [slow("nvme", None), ("nvme", "64KiB"), slow("host", None)])
def test_what_an_inference_leaves_in_memory_is_written_by_training(
    placement: str, tile: str | None, tmp_path: Path
) -> None:
    values = []
    batches = [torch.randint(0, 64, (16,)) for _ in range(4)]
    for mode in (torch.inference_mode, torch.no_grad):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128))
        zinf_fx.offload(model, store=tmp_path, placement=placement, tile=tile, chunk="64KiB")
        call = torch.compile(model, backend="zinf")
        optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            with mode():
                call(batches[0])
                call(batches[1])
            for inputs in batches[2:]:
                call(inputs).square().mean().backward()
                optimizer.step()  # which goes on in the next inference
                optimizer.zero_grad()
        values.append([p.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *values))


class _Moving:
    """Of a plan, that it moves the same tiles as any other."""

    def moves_as(self, other: object) -> bool:
        return True


def test_what_stays_is_of_the_same_storages_tile_by_tile() -> None:
    """Two modules of one shape whose parameters have changed places would share places in memory."""
    cache, storage, other = TileCache(), SimpleNamespace(key=1), SimpleNamespace(key=2)
    dropped: list[int] = []
    cache.drop_staying = lambda: dropped.append(len(dropped))
    plans = [_Moving() for _ in range(3)]
    cache.stay_for(plans[0], [storage, other])
    cache.stay_for(plans[1], [storage, other])
    assert len(dropped) == 1  # nothing was there before the first
    cache.stay_for(plans[2], [other, storage])
    assert len(dropped) == 2
