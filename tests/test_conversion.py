"""Module.to() and its kin give stored parameters another implementation, at any moment but within a backward pass."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gate import named, slow
from ranks import training
from ranks.launching import on_ranks
from torch import nn
from twins import Net, assert_same_gradients, pair, x  # noqa: F401
from versions import BEFORE_2_12

import zinf_fx
from zinf_fx.sizes import blocks

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cpu": lambda m: m.cpu(),
    "to the same": lambda m: m.to("cpu", torch.float32),
    "double": lambda m: m.double(),
    "double and back": lambda m: m.double().float(),
}


def step(run: Callable, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = run(*inputs)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("conversion", named(CONVERSIONS, {"double"}))
def test_training_goes_on_after_a_conversion(pair: tuple[Net, Net], conversion: str) -> None:  # noqa: F811
    plain, stored = pair
    run = torch.compile(stored, backend="zinf")
    options = {"lr": 1e-2, "fused": True}
    optimizers = [torch.optim.AdamW(model.parameters(), **options) for model in pair]
    seen: list[torch.Tensor] = []
    stored.layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.dtype))
    identities = [id(p) for p in stored.parameters()]
    for number in range(2):
        batch = x()
        assert torch.equal(step(plain, optimizers[0], batch), step(run, optimizers[1], batch)), number
    for model in pair:
        CONVERSIONS[conversion](model)
    dtype = plain.scale.dtype
    assert [id(p) for p in stored.parameters()] == identities
    assert all(p.dtype == p.stored.dtype == dtype and p.stored.tier == "nvme" for p in stored.parameters())
    assert_same_gradients(stored, plain)
    if dtype != torch.float32:
        optimizers = [torch.optim.AdamW(model.parameters(), **options) for model in pair]
    del seen[:]
    for number in range(2):
        batch = x().to(dtype)
        assert torch.equal(step(plain, optimizers[0], batch), step(run, optimizers[1], batch)), number
    assert_same_gradients(stored, plain)
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(stored.parameters(), plain.parameters(), strict=True))
    assert seen == [dtype] * 2  # hooks of the user go with the object


STEPS: list[Callable[[nn.Module], nn.Module]] = [lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.double()]


def train(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Two steps after each of the conversions, with gradients that are converted too."""
    losses = []
    for convert in STEPS:
        convert(model)
        if BEFORE_2_12:  # it doesn't notice by itself
            torch._dynamo.reset()
        run = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        for (batch,) in training.batches(2, training.this_rank(), 1):
            optimizer.zero_grad()
            run(*batch).backward()
            losses.append(run(*batch).item())
            optimizer.step()
    return losses


def converted(rank: int, placement: str, compiled: bool) -> None:
    """Assert that losses, parameters and gradients equal those of plain PyTorch, and that tied weights stay so."""
    plain = training.model()
    expected = train(plain, training.data_parallel)
    torch._dynamo.reset()
    model = zinf_fx.offload(training.model(), placement=placement)
    assert train(model, (lambda m: torch.compile(m, backend="zinf")) if compiled else (lambda m: m)) == expected
    assert model.head.weight is model.tokens.weight
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert all(mine.equal(theirs) for mine, theirs in pairs)
    used = [(mine.grad, theirs.grad) for mine, theirs in pairs if mine.grad is not None]
    assert len(used) >= 10 and all(mine.equal(theirs) for mine, theirs in used)


@pytest.mark.parametrize(
    ("size", "placement", "compiled"), [(1, "nvme", True), (2, "infinity-nvme", True), slow(2, "zero-2", False)]
)
def test_a_language_model_trains_on_after_conversions(size: int, placement: str, compiled: bool) -> None:
    on_ranks(size, converted, placement, compiled)


@pytest.mark.parametrize(("finishes", "pack"), [(False, "auto"), (True, None), slow(True, "auto"), slow(False, None)])
def test_the_space_of_the_old_values_is_free_right_after_a_conversion(tmp_path: Path, pack: str | None, finishes: bool):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 1, bias=False))
    zinf_fx.offload(model, store=tmp_path, placement="nvme", pack=pack)
    run = torch.compile(model, backend="zinf")
    optimizer = zinf_fx.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(run, optimizer, torch.randn(64))
    optimizer.zero_grad()
    if finishes:
        optimizer.finish()
    allocations = [weakref.ref(p.stored.bytes.allocation) for p in model.parameters()]
    store = model[0].weight.stored.tiers.store_in_use
    model.double()
    assert [allocation() for allocation in allocations] == [None] * 9
    assert store.in_use == sum(blocks(p.nbytes) for p in model.parameters())
    step(model, zinf_fx.optim.SGD(model.parameters(), lr=0.1), torch.randn(64).double())


@pytest.mark.parametrize("stored", [False, True])
def test_an_ensemble(tmp_path: Path, stored: bool) -> None:
    """It is made as torch.func's pages make one: a skeleton without values, called with all models' parameters
    together."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)]
    batch = torch.linspace(-1, 1, 12).view(3, 4)
    expected = torch.stack([model(batch) for model in models])
    for model in models if stored else ():
        zinf_fx.offload(model, store=tmp_path, placement="nvme")
        model(batch).sum().backward()
    parameters, buffers = torch.func.stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")
    assert all(
        p.is_meta and type(p) is nn.Parameter and (p.grad is None or p.grad.is_meta) for p in skeleton.parameters()
    )

    def call_member(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(skeleton, (parameters, buffers), (batch,))

    torch.testing.assert_close(torch.vmap(call_member)(parameters, buffers), expected)
