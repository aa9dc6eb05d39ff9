"""written_inputs: snapshots of inputs that a graph writes to, where backward needs what they were."""

from __future__ import annotations

import pytest
import torch
from passes.capturing import Record, compiled
from torch import Tensor, fx, nn

import zinf_fx
from zinf_fx import ops
from zinf_fx.passes.ir.framework import nodes_calling

aten = torch.ops.aten


class Centred(nn.Module):
    """Subtracts a running mean, which it updates first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return torch.tanh(x - self.mean)


def planned(activations: str) -> Record:
    config = zinf_fx.Config(placement="infinity-nvme", activations=activations)
    call, record = compiled(nn.Sequential(*(Centred() for _ in range(4))), config)
    call(torch.randn(4, 8)).sum().backward()
    return record


def copies_in(graph: fx.Graph) -> list[fx.Node]:
    return list(nodes_calling(graph, aten.clone.default))


@pytest.mark.parametrize(("activations", "copies"), [("keep", 0), ("recompute", 2)])
def test_only_what_backward_needs_is_copied(activations: str, copies: int) -> None:
    """Behind the first product, where it is used first: at the beginning, a copy would be an operator of its own."""
    graph = planned(activations).planned["forward"][0].graph
    copied = copies_in(graph)
    assert len(copied) == copies and not list(nodes_calling(graph, ops.snapshot))
    for copy in copied:
        assert copy > min(nodes_calling(graph, aten.addmm.default))
        assert copy in graph.output_node().args[0]
        (write,) = (user for user in copy.args[0].users if user.target is aten.copy_.default)
        assert copy < write


def test_nothing_that_is_written_to_is_saved_itself() -> None:
    graph = planned("recompute").planned["forward"][0].graph
    written = {node.args[0] for node in nodes_calling(graph, aten.copy_.default)}
    assert len(written) == 4 and written.isdisjoint(graph.output_node().args[0])
