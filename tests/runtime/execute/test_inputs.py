"""Compiled code finds the storages of its parameters once, and holds neither them nor their bytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zinf_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def applied(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[], torch.nn.Module]:
    return lambda: zinf_fx.offload(torch.nn.Linear(16, 16), store=tmp_path, placement="device")


def test_code_that_outlives_a_model_holds_none_of_its_bytes(stored: Callable[[], torch.nn.Module]) -> None:
    run, x = torch.compile(applied, backend="zinf"), torch.randn(3, 16)
    models = [stored(), stored()]
    for _ in range(3):
        model = models.pop() if models else stored()
        for _ in range(2):
            run(model, x).backward()
        storages = [parameter.stored for parameter in model.parameters()]
        gone = [weakref.ref(storage) for storage in storages] + [
            weakref.ref(storage.bytes.on_device) for storage in storages
        ]
        expected = torch.nn.functional.linear(x, *(p.full_tensor() for p in model.parameters())).square().mean()
        assert torch.equal(run(model, x), expected)
        del model, storages
        gc.collect()
        assert not any(reference() is not None for reference in gone)


def test_models_that_take_turns_compute_from_their_own_values(stored: Callable[[], torch.nn.Module]) -> None:
    run, x, models = torch.compile(applied, backend="zinf"), torch.randn(3, 16), [stored(), stored()]
    plain = [torch.nn.Linear(16, 16) for _ in models]
    for model, twin in zip(models, plain, strict=True):
        twin.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    for _ in range(3):
        for model, twin in zip(models, plain, strict=True):
            loss = run(model, x)
            assert torch.equal(loss, applied(twin, x))
            loss.backward()
            applied(twin, x).backward()
            for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(parameter.grad, other.grad)
                with torch.no_grad():
                    parameter.sub_(parameter.grad)
                    other.sub_(other.grad)
                parameter.grad = other.grad = None
