"""Saved activations that leave for host memory or disk, or are recomputed: the same training, with fewer bytes kept."""

from __future__ import annotations

import copy
import errno
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from followed import followed_plans
from gate import named, slow
from injecting import Fault, clear_faults, inject
from torch import nn
from torch.nn import functional as F

import zinf_fx
from zinf_fx.errors import StoredTensorError, StoreError
from zinf_fx.frontend import capture
from zinf_fx.frontend.explain import plan_model
from zinf_fx.observe.stats import Stats
from zinf_fx.plan.memory.accounting import Traffic, phases
from zinf_fx.plan.plan import Plan
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.execute.executor import EXECUTOR

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=2, hidden=64, heads=4, context=64, vocabulary=128)
STEPS = 4


@pytest.fixture(autouse=True)
def nothing_left(fresh_dynamo: None) -> Iterator[None]:
    yield
    torch.compiler.reset()
    EXECUTOR.reset()
    gc.collect()


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 128, (4, 64)), torch.randint(0, 128, (4, 64))


def train(call: Callable, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = call(*batch())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def placed(tier: str, states: str = "nvme") -> dict[str, str]:
    return {"parameters": states, "gradients": states, "optimizer": states, "activations": tier}


def left(plan: Plan) -> int:
    """Return bytes of the activations that leave."""
    return sum(tile.nbytes for tile in plan.graph("forward").tiles if tile.activation)


POLICIES: dict[str, dict[str, object]] = {
    "all to host memory": {"placement": "infinity-cpu", "activations": "offload"},
    "from resident states": {"placement": placed("nvme", "device"), "activations": "keep"},
    "checkpoints to disk": {"placement": placed("nvme"), "activations": "recompute"},
    "a checkpoint for every other layer, on the host": {"placement": placed("host"), "activations": 2},
    "chosen, little room": {"placement": "nvme", "activations": "auto", "device_memory": "2MiB", "tile": None},
    "all to disk, a host budget": {"placement": "nvme", "activations": "offload", "host_memory": "16MiB"},
    "all to disk, no prefetch": {"placement": "nvme", "activations": "offload", "prefetch": None},
}


@cache
def plainly_trained() -> tuple[GPT, list[float]]:
    plain = build()
    return plain, train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))


OF_THE_GATE = {"chosen, little room"}


@pytest.mark.parametrize("name", named(POLICIES, OF_THE_GATE))
def test_training_is_bitwise_that_of_plain_pytorch(tmp_path: Path, name: str) -> None:
    plain, expected = plainly_trained()
    model = zinf_fx.offload(build(), store=tmp_path, **POLICIES[name])
    losses = train(torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2))
    assert losses == expected
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name


class Layer(nn.Module):
    """Is a transformer's layer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Layers(nn.Module):
    """What is quickly planned, and saves 9 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def planned(**options: object) -> Plan:
    (plan,) = plan_model(Layers(), (torch.randn(1024, 64),), placement="nvme", tile=None, **options).plans
    return plan


@pytest.mark.slow
def test_less_room_keeps_less() -> None:
    """Rates are nominal: what is chosen depends on those that are measured."""
    with mock.patch.object(capture, "measured", lambda *_: capture.NOMINAL):
        _less_room_keeps_less()


def _less_room_keeps_less() -> None:
    everything = planned().kept
    assert everything == planned(activations="auto", device_memory="1GiB").kept
    more, less = (planned(activations="auto", device_memory=f"{size}KiB").kept for size in (9000, 7000))
    assert everything > more > less
    offloaded, two, four = (planned(activations=choice).kept for choice in ("offload", 2, 4))
    assert offloaded < two < four < everything


def test_kept_activations_that_exceed_the_budget_are_refused() -> None:
    with pytest.raises(zinf_fx.errors.BudgetError, match="activations kept for backward") as refused:
        planned(device_memory="5MiB")
    assert 'activations="recompute", "offload" or "auto"' in str(refused.value)


def test_layers_without_numbers_are_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).tanh().sum()

    with pytest.raises(zinf_fx.errors.PlanError, match=r"blocks\.3\.mlp\.up\.weight"):
        zinf_fx.explain(Plain(), torch.randn(4, 8), activations=2)


def settled(model: nn.Module) -> Stats:
    """Return the counters once nothing is under way: a step starts reads for the next."""
    before = None
    while before != (before := zinf_fx.stats(model)):
        time.sleep(0.05)
    return before


@pytest.mark.parametrize("residency", [True, slow(False)])
def test_a_step_moves_exactly_what_its_plan_says(tmp_path: Path, residency: bool) -> None:
    options = {"placement": "nvme", "activations": "offload", "residency": residency, "host_memory": "16MiB"}
    model = zinf_fx.offload(build(), store=tmp_path, **options)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), overlap=False)
    compiled = torch.compile(model, backend="zinf")
    with followed_plans(model) as plans:
        train(compiled, optimizer, 2)
    (plan,) = plans
    before = settled(model)
    train(compiled, optimizer, 4)
    after = settled(model)
    predicted = sum((phase for _, phase in phases(plan)), Traffic())
    assert (after.bytes_read - before.bytes_read) / 4 == predicted.nvme_to_host
    assert (after.bytes_written - before.bytes_written) / 4 == predicted.host_to_nvme
    assert dict(phases(plan))["forward"].host_to_nvme >= left(plan) > 2 << 20


class Stack(nn.Module):
    """A few layers with dropout, whose masks are saved too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.25)
        return x.square().sum()


@pytest.mark.parametrize("device_memory", [None, slow("3MiB")])
def test_random_numbers_are_those_of_forward(tmp_path: Path, device_memory: str | None) -> None:
    torch.manual_seed(0)
    plain, x = Stack(), torch.randn(64, 256)
    model = zinf_fx.offload(
        copy.deepcopy(plain),
        store=tmp_path,
        placement="nvme",
        activations="offload" if device_memory is None else "auto",
        device_memory=device_memory,
        tile=None,
    )
    for call in (plain, torch.compile(model, backend="zinf")):
        torch.manual_seed(3)
        call(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)


def test_room_on_disk_is_taken_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zinf_fx.offload(Stack(), store=tmp_path, placement="nvme", activations="offload")
    call, x = torch.compile(model, backend="zinf"), torch.randn(64, 256)
    allocate = Store.allocate

    def full(self: Store, nbytes: int) -> object:
        if nbytes == x.nbytes:
            raise StoreError("allocate", str(tmp_path), "the disk is full", length=nbytes, errno=errno.ENOSPC)
        return allocate(self, nbytes)

    monkeypatch.setattr(Store, "allocate", full)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with pytest.raises(StoreError, match="the disk is full"):
        call(x)
    assert torch.equal(torch.get_rng_state(), state), "nothing was computed"
    monkeypatch.setattr(Store, "allocate", allocate)
    call(x).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_storages_serve_again(tmp_path: Path) -> None:
    model = zinf_fx.offload(Stack(), store=tmp_path, placement="nvme", activations="offload")
    call, x = torch.compile(model, backend="zinf"), torch.randn(64, 256)
    allocated: list[int] = []
    for _ in range(2):  # gradients have their places from then on
        call(x).backward()
    store, allocate = model.layers[0].weight.stored.tiers.store, Store.allocate
    store.allocate = lambda nbytes: allocated.append(nbytes) or allocate(store, nbytes)
    for _ in range(3):
        call(x).backward()
    assert not allocated
    losses = [call(x), call(x)]  # both wait for their backward: one more storage for each activation
    assert len(allocated) > 0
    more = len(allocated)
    for loss in losses:
        loss.backward()
    losses = [call(x), call(x)]
    assert len(allocated) == more


@pytest.mark.parametrize("stage", ["read", "write"])
def test_a_disk_error_reaches_whoever_needs_the_activation(tmp_path: Path, stage: str) -> None:
    model = zinf_fx.offload(Stack(), store=tmp_path, placement=placed("nvme", "host"), activations="keep")
    call, x = torch.compile(model, backend="zinf"), torch.randn(64, 256)
    call(x).backward()
    store = model.layers[0].weight.stored.tiers.store
    torch.manual_seed(3)
    if stage == "write":
        inject(store, Fault("completion", operation="write", errno=errno.EIO))
    loss = call(x)
    if stage == "read":
        inject(store, Fault("completion", operation="read", errno=errno.EIO))
    with pytest.raises(StoreError, match=r"EIO|Input/output error"):
        loss.backward()
    clear_faults(store)


class Rotary(nn.Module):
    """Pairs of features are turned as complex numbers, as in the original Llama; one of the saved is conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.up(x).sin().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * pairs * pairs.conj()).flatten(-2)
        return self.down(turned).square().mean()


class Columns(nn.Module):
    """An operator whose kernel lays its result out in another way than its fake says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(by_columns(self.up(x))).square().mean()


@torch.library.custom_op("zinf_tests::by_columns", mutates_args=())
def by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.clone().t().contiguous().t()


by_columns.register_fake(torch.empty_like)
by_columns.register_autograd(lambda ctx, grad: grad.clone())


@pytest.mark.parametrize(("build", "tolerance", "tier"), [(Rotary, 0.0, "nvme"), slow(Columns, 1e-5, "host")])
def test_what_comes_back_is_what_left_however_it_lay(
    tmp_path: Path, build: type[nn.Module], tolerance: float, tier: str
) -> None:
    """It is to the bit, unless it comes back as its fake lay: sums are then of another order."""
    torch.manual_seed(0)
    plain, x = build(), torch.randn(256, 64)
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement=placed(tier))
    for call in (plain, torch.compile(model, backend="zinf")):
        call(x).backward()
    (plan,) = plan_model(model, (x,)).plans
    assert left(plan) > 0
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tier", [slow("host"), "nvme"])
def test_a_model_that_dies_takes_its_activations_along(tmp_path: Path, tier: str) -> None:
    model = zinf_fx.offload(Stack(), store=tmp_path, placement=placed(tier))
    call = torch.compile(model, backend="zinf")
    call(torch.randn(64, 256)).backward()
    tiers = weakref.ref(model.layers[0].weight.stored.tiers)
    del model, call
    gc.collect()
    assert tiers() is None
    assert not list(tmp_path.iterdir())


def test_copies_of_tokens_never_stand_for_other_values(tmp_path: Path) -> None:
    """A hook that copies what is saved lets an activation go before its backward."""
    model = zinf_fx.offload(Stack(), store=tmp_path, placement="nvme", activations="offload")
    call = torch.compile(model, backend="zinf")
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        first, second = call(torch.randn(64, 256)), call(torch.randn(64, 256))
    second.backward()
    with pytest.raises(StoredTensorError, match="saved-tensor hook"):
        first.backward()
