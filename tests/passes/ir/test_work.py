"""What operators compute, as counted from their nodes."""

from __future__ import annotations

import pytest
import torch
from passes.capturing import compiled
from torch import nn

from zinf_fx.frontend.explain import plan_model
from zinf_fx.passes.ir.work import Work, total, work_of


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


class Attending(nn.Module):
    """Has products of matrices, a convolution, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.linear(self.convolution(x).transpose(1, 2)).unsqueeze(1).chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value).sum()


class Layers(nn.Module):
    """Layers of attention alone, which backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            query, key, value = layer(x).unsqueeze(1).chunk(3, dim=-1)
            x = x + nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1)
        return x.sum()


def test_attention_that_backward_repeats_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Forward computes two products per layer, backward five, and those of all layers but the last again."""
    (kept,), (repeated,) = (
        plan_model(Layers(), (torch.randn(2, 8, 16),), placement="nvme", activations=activations).plans
        for activations in ("keep", 1)
    )
    of_kept, of_repeated = (
        sum(operator.flops for graph in plan.graphs for operator in graph.operators) for plan in (kept, repeated)
    )
    attention, linear = 2 * 2 * 2 * 8 * 8 * 16, 2 * 2 * 8 * 16 * 48
    assert of_repeated - of_kept == 2 * (attention + linear)
    assert "isn't counted" not in caplog.text
    forward = repeated.graph("forward").operators
    assert {operator.dtype for operator in forward if operator.flops} == {torch.float32}


def test_a_graph_for_any_size_computes_as_much_as_that_for_the_size_at_hand() -> None:
    def work(dynamic: bool) -> Work:
        call, record = compiled(Attending(), dynamic=dynamic)
        call(torch.randn(4, 8, 6)).backward()
        nodes = [node for graph, _ in record.planned.values() for node in graph.graph.nodes]
        return total(map(work_of, nodes), fused=False)

    assert work(dynamic=True) == work(dynamic=False)
    assert work(dynamic=True).flops > 3 * 2 * 4 * 6 * 8 * 24  # the linear has as many, in forward alone a third
