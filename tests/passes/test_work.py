"""What operators compute, as counted from their nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zinf_fx.frontend.explain import plan_model


class Views(nn.Module):
    """Transposes, slices and sizes, of which none is a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.first(x).t().split([3, 5])
        return self.second(torch.cat([high, low]).view(x.shape[1], -1).t())


@pytest.mark.parametrize(
    ("model", "eager", "inductor"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh(), nn.Linear(8, 8)), [3, 1], [2, 1]),
        (Views(), [2, 1], [2, 1]),
    ],
)
def test_kernels_are_counted(model: nn.Module, eager: list[int], inductor: list[int]) -> None:
    """Compiled, what follows a product is taken for one."""
    for compute, kernels in (("eager", eager), ("inductor", inductor)):
        with torch.no_grad():
            (plan,) = plan_model(model, (torch.randn(4, 8),), placement="nvme", pack=None, compute=compute).plans
        assert [operator.kernels for operator in plan.graphs[0].operators] == kernels
