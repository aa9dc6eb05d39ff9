"""Codes whose parameter says by attributes what they mean, as those of bitsandbytes, which isn't needed for this."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zinf_fx
from zinf_fx import StoredTensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Params4bit(nn.Parameter):
    def __new__(cls, codes: Tensor, scales: Tensor | None) -> Params4bit:
        parameter = torch.Tensor._make_subclass(cls, codes, False)
        parameter.quant_state = scales
        return parameter


class Int8Params(nn.Parameter):
    def __new__(cls, codes: Tensor, scales: Tensor) -> Int8Params:
        parameter = torch.Tensor._make_subclass(cls, codes, False)
        parameter.CB, parameter.SCB = codes, scales
        return parameter


class State:
    CB: Tensor | None = None
    SCB: Tensor | None = None


for _known in (Params4bit, Int8Params, State):
    _known.__module__ = "bitsandbytes.nn.modules"


class Linear4bit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Params4bit(torch.randint(256, (width * width, 1)).byte(), torch.rand(width, 1) / width / 8)
        self.support_avx512bf16_for_cpu = True

    def forward(self, x: Tensor) -> Tensor:
        assert not self.support_avx512bf16_for_cpu or type(self.weight) is Params4bit, "the layout would change"
        return x @ (self.weight.view(x.shape[-1], -1).to(x.dtype) * self.weight.quant_state)


class Linear8bit(nn.Module):
    """Once it was called, it has the codes in a state of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Int8Params(
            torch.randint(-128, 128, (width, width), dtype=torch.int8), torch.rand(width, 1) / width / 8
        )
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        y = x @ (self.state.CB.data.to(x.dtype) * self.state.SCB)
        self.weight.data = self.state.CB
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.four, self.eight, self.called = Linear4bit(32), Linear8bit(32), Linear8bit(32)
        self.shift = nn.Parameter(torch.ones(32))
        self.called(torch.ones(1, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.eight(self.four(x * self.shift))).square().mean()


def trained(model: nn.Module, backend: str | None) -> list[Tensor]:
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    x, losses = torch.linspace(-1, 1, 96).view(3, 32), []
    for _ in range(2):
        losses.append(run(x))
        losses[-1].backward()
        with torch.no_grad():
            model.shift -= 0.5 * model.shift.grad
        model.shift.grad = None
    return [*(loss.detach() for loss in losses), model.shift]


def values(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.full_tensor() if isinstance(tensor, StoredTensor) else tensor.detach() for tensor in tensors]


@pytest.mark.parametrize("backend", [None, "zinf"])
def test_training_over_codes_equals_that_in_memory(tmp_path: Path, backend):
    model = zinf_fx.offload(Model(), store=tmp_path, placement={"parameters": "nvme"})
    codes = [model.four.weight, model.eight.weight, model.called.weight]
    assert all(isinstance(code, StoredTensor) and code.stored.numel == code.numel() == 1024 for code in codes)
    assert model.eight.weight.CB is model.eight.weight and model.called.state.CB is model.called.weight
    actual = values(trained(model, backend))
    expected = values(trained(Model(), "aot_eager" if backend else None))
    assert all(map(torch.equal, actual, expected)) and not torch.equal(actual[0], actual[1])


def test_copies_and_conversions_keep_what_the_codes_mean(tmp_path: Path):
    model = zinf_fx.offload(Model(), store=tmp_path, placement="nvme")
    expected = model(torch.ones(2, 32))
    for other in (copy.deepcopy(model), model.to("cpu", torch.float32)):
        assert other.four.weight.quant_state is not None
        assert torch.equal(other(torch.ones(2, 32)), expected)


def test_numbers_that_are_made_of_codes_are_not_stored(tmp_path: Path):
    """The library's functions make them where autograd records nothing, and where `Module.to` converts weights."""
    model = zinf_fx.offload(Model(), store=tmp_path, placement="nvme")
    with torch.no_grad():
        assert type(model.eight.weight.to(torch.float32)) is torch.Tensor
        assert isinstance(model.shift.to(torch.float64), StoredTensor)


def test_the_schedule_has_the_codes(tmp_path: Path):
    model = zinf_fx.offload(Model(), store=tmp_path, placement="nvme", pack=None)
    text = str(zinf_fx.explain(model, torch.ones(2, 32)))
    assert "Plan of a training step: 4 tiles" in text and "captured as" not in text


def test_what_has_no_codes_yet_stays_and_a_warning_says_how_it_leaves(tmp_path: Path):
    layer = nn.Module()
    layer.weight = Params4bit(torch.ones(4, 4), None)
    with pytest.warns(UserWarning, match="codes of bitsandbytes, which its layers have once they were moved"):
        zinf_fx.offload(layer, store=tmp_path, placement="nvme")
    assert type(layer.weight) is Params4bit


def test_what_users_call_annotations_is_theirs(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    layer.weight.annotations = {"source": "a file"}
    zinf_fx.offload(layer, store=tmp_path, placement="nvme")
    assert isinstance(layer.weight, StoredTensor)
