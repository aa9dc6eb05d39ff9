"""Operators that Inductor compiles: training is that of PyTorch's kernels within rounding, and the same each time."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from gate import slow
from torch import Tensor, nn
from torch.nn import functional as F
from twins import fresh_dynamo

import zinf_fx
from zinf_fx.frontend.capture import Capture
from zinf_fx.runtime.execute.inductor import CompiledRegion

__all__ = ["fresh_dynamo"]  # a fixture

WIDTH = 16


class Layers(nn.Module):
    """Residual layers with a norm and dropout."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.dropout(F.gelu(layer(norm(x))), 0.25)
        return x.square().mean()


def trained(model: nn.Module, store: Path, compute: str, placement: str, **options: object) -> list[Tensor]:
    """Losses of three steps, and the parameters then."""
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
    """All regions that graphs are bound to."""
    regions: list[CompiledRegion] = []
    original = Capture._regions

    def kept(*arguments: object) -> dict[str, CompiledRegion]:
        found = original(*arguments)
        regions.extend(found.values())
        return found

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
        found = trained(model, tmp_path, "inductor", placement, **options)
    assert compiled and all(region.is_compiled for region in compiled)
    assert not [record for record in caplog.records if record.name == "zinf_fx"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    again = trained(model, tmp_path, "inductor", placement, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
