"""torch.autograd.detect_anomaly over stored parameters: NaN in gradients that leave raises, and is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gate import slow
from torch import Tensor, nn

import zinf_fx
from zinf_fx.errors import ZinfError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PLACEMENTS: dict[str, dict[str, object]] = {
    "nvme": {"placement": "nvme"},
    "host": {"placement": "host"},
    "device": {"placement": "device"},
    "unpacked": {"placement": "infinity-nvme", "pack": None},
    "recomputed": {"placement": "nvme", "activations": "recompute"},
}


class Root(nn.Module):
    """Its gradient at zero is NaN, and its value is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, at: float) -> Tensor:
        x = self.last(self.first(x))
        return (x * at).abs().sqrt().sum()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="zinf", dynamic=False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("step_in_backward", [False, True])
@pytest.mark.parametrize("name", ["nvme", "device", slow("host"), slow("unpacked"), slow("recomputed")])
def test_nan_raises_and_is_named(tmp_path: Path, name: str, step_in_backward: bool) -> None:
    """Nothing has been added or updated, and without the check the same goes through as it does in eager code."""
    model = zinf_fx.offload(Root(), store=tmp_path, **PLACEMENTS[name])
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=0.1, step_in_backward=step_in_backward)
    before = {key: value.full_tensor() for key, value in model.named_parameters()}
    run = compiled(model)
    message = r"gradient of '(first|last)\..*nan values.*aten\..*test_anomaly.*sqrt"
    with pytest.raises(ZinfError, match=message), torch.autograd.detect_anomaly(check_nan=True):
        run(torch.ones(2, 4), 0.0).backward()
    for key, value in model.named_parameters():
        assert value.grad is None and torch.equal(value.full_tensor(), before[key])
    if not step_in_backward:
        with torch.autograd.detect_anomaly(check_nan=False):
            run(torch.ones(2, 4), 0.0).backward()
        assert any(parameter.grad.isnan().any() for parameter in model.parameters())
        optimizer.zero_grad()


class Masked(nn.Module):
    """Values on the way are NaN, and gradients are not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.where(y > 1e9, (0.0 * y.detach()).div(0.0), y.square()).sum()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_nan_that_reaches_no_gradient_is_none(tmp_path: Path) -> None:
    model = zinf_fx.offload(Masked(), store=tmp_path, placement="nvme", activations="recompute")
    gradients = []
    for check in (False, True):
        with torch.autograd.detect_anomaly(check_nan=check):
            compiled(model)(torch.ones(2, 4)).backward()
        gradients.append(model.linear.weight.grad.full_tensor())
        model.zero_grad()
    assert torch.equal(*gradients)
