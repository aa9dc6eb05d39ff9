"""Operators that Inductor compiles: training is that of PyTorch's kernels within rounding, and the same each time."""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path

import pytest
import test_transformers
import torch
from gate import slow
from torch import Tensor, nn
from torch.nn import functional as F

import zinf_fx
from zinf_fx.frontend.capture import Capture
from zinf_fx.runtime.execute.inductor import CompiledRegion

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH = 16


class Layers(nn.Module):
    """Has residual layers with a norm and dropout."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.dropout(F.gelu(layer(norm(x))), 0.25)
        return x.square().mean()


class Looked(nn.Module):
    """The sum of what two tables have for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(4, WIDTH), nn.Embedding(4, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return torch.tanh(self.words(words) + self.places(words.flip(0))).pow(3).mean()


def trained(model: nn.Module, store: Path, compute: str, placement: str, **options: object) -> list[Tensor]:
    """Return losses of three steps, and the parameters then."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    dynamic = True if "micro_batches" in options else None
    options = {"compute": compute, "store": store, "placement": placement, **options}
    call = torch.compile(model, backend="zinf", options=options, dynamic=dynamic)
    optimizer = zinf_fx.optim.SGD(model.parameters(), lr=0.1)  # Adam takes rounding for a gradient where that is 0
    losses = []
    torch.manual_seed(0)
    for _ in range(3):
        loss = call(torch.randn(4, 6, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + [parameter.full_tensor().clone() for parameter in model.parameters()]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[CompiledRegion]:
    """Return all regions that graphs are bound to."""
    regions: list[CompiledRegion] = []
    original = Capture._regions

    def kept(*arguments: object) -> dict[str, CompiledRegion]:
        compiled_regions = original(*arguments)
        regions.extend(compiled_regions.values())
        return compiled_regions

    monkeypatch.setattr(Capture, "_regions", kept)
    return regions


@pytest.mark.parametrize(
    ("placement", "options"),
    [
        ("infinity-nvme", {}),
        slow("device", {}),
        slow("zero-offload", {}),
        slow("nvme", {"activations": "recompute"}),
        slow("infinity-cpu", {"activations": "offload"}),
        slow("infinity-nvme", {"pack": None, "prefetch": None, "residency": False}),
        slow("infinity-nvme", {"micro_batches": 2}),
        slow("nvme", {"device_memory": "20KiB"}),
    ],
)
def test_trains_as_with_pytorchs_kernels_and_the_same_each_time(
    placement: str, options: dict, tmp_path: Path, compiled: list[CompiledRegion], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    model = Layers()
    expected = trained(model, tmp_path, "eager", placement, **options)
    assert not compiled
    with caplog.at_level(logging.WARNING, "zinf_fx"):
        actual = trained(model, tmp_path, "inductor", placement, **options)
    assert compiled and all(region.is_compiled for region in compiled)
    assert not [record for record in caplog.records if record.name == "zinf_fx"]
    for value, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)
    again = trained(model, tmp_path, "inductor", placement, **options)
    assert all(torch.equal(value, other) for value, other in zip(actual, again, strict=True))


def test_threads_that_add_to_the_same_rows_add_in_the_same_order(
    tmp_path: Path, compiled: list[CompiledRegion], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    torch.manual_seed(1)
    model, words = Looked(), torch.randint(0, 4, (1 << 14,))
    options = {"compute": "inductor", "store": tmp_path, "placement": "infinity-nvme"}
    call = torch.compile(model, backend="zinf", options=options)
    gradients = []
    for _ in range(5):
        model.zero_grad()
        call(words).backward()
        gradients.append(model.words.weight.grad.full_tensor().clone())
    assert compiled and all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_other_sizes(dynamic: bool | None, tmp_path: Path, compiled: list[CompiledRegion]) -> None:
    torch.manual_seed(1)
    plain = Layers()
    calls = []
    for compute in ("eager", "inductor"):
        torch._dynamo.reset()
        options = {"compute": compute, "store": tmp_path, "placement": "nvme"}
        calls.append(torch.compile(copy.deepcopy(plain), backend="zinf", options=options, dynamic=dynamic))
    for rows in (2, 3, 5, 1):
        losses = []
        for call in calls:
            torch.manual_seed(rows)
            losses.append(call(torch.randn(rows, 2 * rows, WIDTH)))
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        for parameter, other in zip(*(call.parameters() for call in calls), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad.full_tensor())
    assert compiled and all(region.is_compiled for region in compiled)


def test_a_plan_says_what_computes(tmp_path: Path, compiled: list[CompiledRegion]) -> None:
    model, batch = Layers(), torch.randn(4, 6, WIDTH)
    plan = zinf_fx.export_plan(model, (batch,), placement="infinity-nvme", compute="inductor")
    plan.save(tmp_path / "plan.json")
    assert "operators compiled by Inductor" in zinf_fx.explain(model, batch, placement="nvme", compute="inductor")
    options = {"plan": tmp_path / "plan.json", "store": tmp_path}
    torch.compile(model, backend="zinf", options=options)(batch).backward()
    assert compiled
    torch._dynamo.reset()
    with pytest.raises(Exception, match="compute is 'inductor' in the plan, and 'eager' here"):
        torch.compile(Layers(), backend="zinf", options={**options, "compute": "eager"})(batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", test_transformers.MODELS)
def test_models_of_transformers(name: str, tmp_path: Path, compiled: list[CompiledRegion]) -> None:
    build, inputs = test_transformers.MODELS[name]
    results = []
    for compute in ("eager", "inductor"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = zinf_fx.offload(build().train(), store=tmp_path, placement="infinity-nvme")
        call = torch.compile(model, backend="zinf", options={"compute": compute})
        optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = call(**inputs()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append(losses)
    torch.testing.assert_close(*results)
    assert compiled and all(region.is_compiled for region in compiled)
