"""What a captured graph may contain besides layers: buffers, randomness, casts, views; and what it may not."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from gate import slow
from torch import Tensor, nn
from twins import Net, assert_same_gradients, pair, x

import zinf_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

__all__ = ["pair"]  # a fixture


class Mixed(nn.Module):
    """Buffers that change, dropout, and a stored tensor seen through views outside of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(nn.functional.dropout(self.norm(self.one(x)), 0.3, self.training)).square().sum()


@pytest.mark.parametrize(("activations", "autocast"), [("keep", True), slow("recompute", False)])
def test_buffers_dropout_and_autocast(tmp_path: Path, activations: str, autocast: bool) -> None:
    torch.manual_seed(0)
    plain = Mixed()
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme", activations=activations)
    # Under autocast, AOTAutograd traces some gradients in another precision than eager PyTorch computes them.
    reference = torch.compile(plain, backend="aot_eager") if autocast else plain
    batches = [x() for _ in range(3)]
    losses = []
    for net, run in ((plain, reference), (model, torch.compile(model, backend="zinf"))):
        torch.manual_seed(1)
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses.append(run(batch))
            losses[-1].backward()
        net.eval()
        losses.append(run(batches[0]))
    assert [loss.item() for loss in losses[:4]] == [loss.item() for loss in losses[4:]]
    assert_same_gradients(model, plain)
    for (name, a), b in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_views_of_parameters_as_inputs_of_a_graph(pair: tuple[Net, Net]) -> None:
    def function(weight: Tensor, x: Tensor) -> Tensor:
        return (x @ weight).sin().sum()

    plain, model = pair
    batch = x()
    for net, run in ((plain, function), (model, torch.compile(function, backend="zinf"))):
        for _ in range(2):
            run(net.layers[0].weight.t()[:, 1:9], batch).backward()
    assert_same_gradients(model, plain)


def test_a_part_of_a_model_is_compiled(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    for layer in model.layers[1:3]:
        layer.compile(backend="zinf")
    for _ in range(2):
        batch = x()
        plain(batch).backward()
        model(batch).backward()
    assert_same_gradients(model, plain)
