"""Parametrizations of stored parameters, and conversions, at any time: PyTorch swaps implementations for both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gate import slow
from torch import Tensor, nn
from torch.nn.utils import parametrize
from versions import not_before_2_12

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.cycles import no_search_for_cycles

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


WEAKLY = "after a capture that was given up, Dynamo holds the parameters weakly, and PyTorch swaps none that are"


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Invertible(Doubled):
    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


class Plus(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 16) / 4), nn.Parameter(torch.randn(3, 16, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("beo,eoi->bi", torch.einsum("bi,eio->beo", x, self.up).relu(), self.down)


class Adapted(nn.Module):
    """A trained delta of low rank for one parameter of a frozen module, while this is called: PEFT's
    `target_parameters`, which nest."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.base, self.name = base, name
        experts, rows, columns = getattr(self.innermost, name).shape
        self.a, self.b = nn.Parameter(torch.randn(experts, rows, 2)), nn.Parameter(torch.randn(experts, 2, columns))

    @property
    def innermost(self) -> nn.Module:
        return self.base.innermost if isinstance(self.base, Adapted) else self.base

    @contextmanager
    def _active(self) -> Iterator[None]:
        innermost = self.innermost
        parametrize.register_parametrization(innermost, self.name, Plus(self.a @ self.b))
        innermost.parametrizations[self.name].original.requires_grad_(False)
        try:
            with parametrize.cached():
                yield
        finally:
            parametrize.remove_parametrizations(innermost, self.name, leave_parametrized=False)

    def forward(self, x: Tensor) -> Tensor:
        with self._active():
            return self.base(x)


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), Adapted(Adapted(Experts().requires_grad_(False), "up"), "down"))


def losses(model: nn.Module, run: Callable[[Tensor], Tensor], steps: int = 2) -> list[Tensor]:
    """Train every parameter that has a gradient by plain arithmetic."""
    x, results = torch.linspace(-1, 1, 24).view(3, 8), []
    for _ in range(steps):
        loss = run(x).square().mean()
        loss.backward()
        results.append(loss.detach().clone())
        for parameter in model.parameters():
            if (gradient := parameter.grad) is not None:
                value = gradient.full_tensor() if isinstance(gradient, StoredTensor) else gradient
                parameter.data.sub_(value, alpha=0.1)
                parameter.grad = None
    return results


def values(model: nn.Module) -> list[Tensor]:
    state = model.state_dict().values()
    return [value.full_tensor() if isinstance(value, StoredTensor) else value.clone() for value in state]


@not_before_2_12(WEAKLY)
@pytest.mark.parametrize("stored", ["before", "after"])
def test_a_parametrization_for_the_time_of_a_call(tmp_path: Path, stored: str) -> None:
    expected, model = adapted(), adapted()
    bases = [module for module in model.modules() if isinstance(module, Experts)]
    for offloaded in bases if stored == "before" else [model]:
        zinf_fx.offload(offloaded, store=tmp_path, placement="nvme")
    assert all(map(torch.equal, losses(model, torch.compile(model, backend="zinf")), losses(expected, expected)))
    assert all(map(torch.equal, values(model), values(expected)))
    assert all(isinstance(parameter, StoredTensor) for base in bases for parameter in base.parameters())


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        (Invertible, "before it is stored"),
        (Invertible, "before it is compiled"),
        (Doubled, "later"),
        slow(Doubled, "before it is stored"),
        slow(Doubled, "before it is compiled"),
        slow(Invertible, "later"),
    ],
)
def test_a_parametrization_is_registered_and_removed(tmp_path: Path, kind: type[Doubled], when: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    runs = []
    for backend in ("aot_eager", "zinf"):
        torch.compiler.reset()
        model = copy.deepcopy(plain)
        if when == "before it is stored":
            parametrize.register_parametrization(model[0], "weight", kind())
        if backend == "zinf":
            zinf_fx.offload(model, store=tmp_path, placement="nvme")
        if when == "before it is compiled":
            parametrize.register_parametrization(model[0], "weight", kind())
        run = torch.compile(model, backend=backend)
        results = losses(model, run)
        if when == "later":
            parametrize.register_parametrization(model[0], "weight", kind())
            results += losses(model, run)
        results += values(model)
        parametrize.remove_parametrizations(model[0], "weight")
        runs.append([*results, *losses(model, run), *values(model)])
    assert all(map(torch.equal, *runs)) and len(runs[0]) == len(runs[1])


class GivenUp(nn.Module):
    """Dynamo gives up this capture after it has seen the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @contextmanager
    def _cut(self) -> Iterator[None]:
        torch._dynamo.graph_break()
        yield

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.layer.weight
        with self._cut():
            return self.layer(y)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "double": lambda model: model.double().float(),
    "cpu": lambda model: model.cpu(),
    "parametrization": lambda model: parametrize.register_parametrization(model.layer, "weight", Doubled()),
}


@not_before_2_12(WEAKLY)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_after_a_capture_that_was_given_up(tmp_path: Path, change: Callable[[nn.Module], object]) -> None:
    torch.manual_seed(0)
    plain = GivenUp()
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme")
    run = torch.compile(model, backend="zinf")
    with no_search_for_cycles():  # which Python could do at any moment
        assert all(map(torch.equal, losses(model, run, 1), losses(plain, plain, 1)))
        change(model)
    change(plain)
    assert all(map(torch.equal, losses(model, run, 1), losses(plain, plain, 1)))
    assert all(map(torch.equal, values(model), values(plain)))
