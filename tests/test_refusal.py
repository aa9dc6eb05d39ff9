"""What the backend refuses reaches whoever calls a compiled function as the error that it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gate import slow
from torch import nn

import zinf_fx
from zinf_fx.errors import BudgetError, ConfigError, PlanError, PlanFileError, StoredTensorError, StoreError, ZinfError
from zinf_fx.frontend.backend import zinf
from zinf_fx.frontend.capture import Capture

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Two(nn.Module):
    """Two layers, between which a graph may break."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks, self.first, self.second = breaks, nn.Linear(64, 64), nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


def _module(model: nn.Module, **how: object) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="zinf", **how)


def _function(model: nn.Module, **how: object) -> Callable[..., torch.Tensor]:
    return torch.compile(lambda x: model(x), backend="zinf", **how)


def _in_place(model: nn.Module, **how: object) -> Callable[..., torch.Tensor]:
    model.compile(backend="zinf", **how)
    return model


def _nested(model: nn.Module, **how: object) -> Callable[..., torch.Tensor]:
    inner = torch.compile(model, backend="zinf", **how)
    return torch.compile(lambda x: inner(x) + 1, backend="zinf", **how)


def _whole(model: nn.Module, **how: object) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="zinf", fullgraph=True, **how)


REFUSED: dict[str, tuple[dict[str, object], type[ZinfError], str]] = {
    "an unknown option": ({"plasement": "nvme"}, ConfigError, "unknown option 'plasement'"),
    "a budget": ({"placement": "host", "device_memory": "4KiB"}, BudgetError, "graph needs"),
    "a missing plan": ({"plan": "/nowhere/plan.json"}, PlanFileError, "can't be read"),
    "a missing store": ({"placement": "nvme", "store": "/nowhere/at/all"}, StoreError, "/nowhere/at/all"),
}


@pytest.mark.parametrize(
    ("how", "grad"),
    [
        *((how, True) for how in (_module, _function, _in_place, _nested, _whole)),
        (_module, False),
        *(slow(how, False) for how in (_function, _in_place, _nested, _whole)),
    ],
)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_raised_as_it_is(name: str, grad: bool, how: Callable) -> None:
    options, kind, message = REFUSED[name]
    model = Two()
    call = how(model, options=options)
    for _ in range(2):  # nothing is kept of the first attempt
        with torch.set_grad_enabled(grad), pytest.raises(ZinfError, match=message) as refused:
            call(torch.ones(2, 64))
        assert type(refused.value) is kind
        (note,) = refused.value.__notes__
        assert Path(__file__).name in note and "x = self.first(x).tanh()" in note
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_the_graph_behind_a_break_is_named() -> None:
    call = _module(
        Two(breaks=True), options={"placement": "host", "device_memory": "33KiB", "tile": None, "pack": None}
    )
    with pytest.raises(BudgetError) as refused:
        call(torch.ones(2, 64))
    (note,) = refused.value.__notes__
    assert "return self.second(x)" in note


def test_a_model_may_catch_what_a_compiled_part_is_refused_with() -> None:
    call = _module(Two(), options={"plasement": "nvme"})

    def attempt(x: torch.Tensor) -> str:
        try:
            return str(call(x).sum())
        except ConfigError as error:
            return str(error)

    assert "unknown option 'plasement'" in attempt(torch.ones(2, 64))


def test_errors_that_backward_is_compiled_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def bind(self: Capture, module: torch.fx.GraphModule, kind: str) -> Callable:
        if kind == "backward":
            raise PlanError("backward can't be bound")
        return whole(self, module, kind)

    whole = Capture._bind
    monkeypatch.setattr(Capture, "_bind", bind)
    model = zinf_fx.offload(Two(), placement="nvme", store=tmp_path)
    with pytest.raises(PlanError, match="backward can't be bound") as refused:
        _module(model)(torch.ones(2, 64)).sum().backward()
    assert type(refused.value) is PlanError


def test_a_stored_tensor_error_at_the_first_call() -> None:
    model = nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 4))
    zinf_fx.offload(model, placement="host")
    with pytest.raises(StoredTensorError, match="sparse"):
        _module(model)(torch.arange(8))


def test_other_errors_stay_dynamos(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Capture) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Capture, "compile", fail)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a bug"):
        _module(Two(), options={"placement": "host"})(torch.ones(2, 64))


def test_without_dynamo_the_backend_raises_plainly() -> None:
    module = torch.fx.symbolic_trace(Two())
    with pytest.raises(ConfigError, match="unknown option"):
        zinf(module, [torch.ones(2, 64)], options={"plasement": "nvme"})
