"""Operators are timed by running them."""

from __future__ import annotations

import time

import pytest
import torch
from gate import slow
from torch import fx

import zinf_fx
from zinf_fx.errors import PlanError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.passes.ir import timing
from zinf_fx.passes.ir.timing import OperatorTimer
from zinf_fx.runtime.execute.inductor import CompiledRegion


def _operator(call, *values: object) -> list[fx.Node]:
    graph = fx.Graph()
    inputs = []
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            inputs.append(graph.placeholder(f"x{number}"))
            inputs[-1].meta["val"] = value
        else:
            inputs.append(value)
    return [graph.call_function(call, tuple(inputs))]


def test_more_work_takes_longer():
    timer = OperatorTimer()
    small, large = torch.ones(16, 16), torch.ones(768, 768)
    few = timer.seconds(_operator(torch.ops.aten.mm.default, small, small))
    many = timer.seconds(_operator(torch.ops.aten.mm.default, large, large))
    assert 0 < few < many


def test_equal_operators_are_run_once(monkeypatch):
    ran = []
    measured = timing._measured
    monkeypatch.setattr(timing, "_measured", lambda *operator: ran.append(operator) or measured(*operator))
    timer = OperatorTimer()
    tensor = torch.ones(8, 8)
    first = timer.seconds(_operator(torch.ops.aten.relu.default, tensor))
    assert timer.seconds(_operator(torch.ops.aten.relu.default, tensor.clone())) == first
    assert len(ran) == 1
    timer.seconds(_operator(torch.ops.aten.relu.default, tensor.t().contiguous().t()))  # other strides
    timer.seconds(_operator(torch.ops.aten.sum.dim_IntList, tensor, [0]))
    timer.seconds(_operator(torch.ops.aten.sum.dim_IntList, tensor, [1]))  # another argument
    assert len(ran) == 4


def test_what_an_operator_takes_is_measured():
    def sleep(tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return tensor

    assert OperatorTimer().seconds(_operator(sleep, torch.ones(2))) >= 0.02


def test_an_operator_that_cant_be_run_alone_is_named():
    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise ValueError("not like this")

    with pytest.raises(PlanError, match=r"'fail' to 'fail'.*not like this"):
        OperatorTimer().seconds(_operator(fail, torch.ones(2)))


@pytest.mark.parametrize(("trains", "pack"), [(True, "auto"), (False, "auto"), slow(True, None)])
def test_every_operator_of_a_plan_has_its_seconds(trains: bool, pack: str | None):
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Embedding(11, 32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        )
        tokens = torch.zeros(3, 5, dtype=torch.int64)
    with torch.set_grad_enabled(trains):
        planning = plan_model(_Mean(model), (tokens,), zinf_fx.Config(placement="nvme", pack=pack), timed=True)
    (plan,), (seconds,) = planning.plans, planning.seconds
    assert any(tile.members for tile in plan.tiles) == (pack == "auto")
    assert set(seconds) == {(graph.kind, operator.index) for graph in plan.graphs for operator in graph.operators}
    assert all(
        seconds[graph.kind, operator.index] > 0
        for graph in plan.graphs
        for operator in graph.operators
        if operator.flops
    )


def test_compiled_regions_are_timed_as_they_run(monkeypatch):
    modules = []
    measured = timing._measured
    monkeypatch.setattr(timing, "_measured", lambda *operator: modules.append(operator[0]) or measured(*operator))
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        inputs = torch.zeros(3, 32)
    planning = plan_model(_Mean(model), (inputs,), placement="nvme", compute="inductor", timed=True)
    regions = [n.target for module in modules for n in module.graph.nodes if isinstance(n.target, CompiledRegion)]
    assert len(regions) > 1 and all(region.is_compiled for region in regions)
    (plan,), (seconds,) = planning.plans, planning.seconds
    assert all(
        seconds[graph.kind, operator.index] > 0
        for graph in plan.graphs
        for operator in graph.operators
        if operator.flops
    )


class _Mean(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).mean()


class Routed(torch.nn.Module):
    """Rows that go to experts sorted, and come back by the inverse of the permutation."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = torch.nn.Linear(16, 4), torch.nn.Parameter(torch.randn(4, 16, 16))
        self.last = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, order = self.router(x).argmax(-1).sort()
        ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        x = torch._grouped_mm(x[order].bfloat16(), self.experts.bfloat16(), offs=ends).float()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return self.last(x[back])


def test_experts_are_timed_with_groups_and_a_permutation():
    planning = plan_model(Routed(), (torch.randn(64, 16),), placement="nvme", pack=None, timed=True)
    (seconds,) = planning.seconds
    assert seconds and all(duration >= 0 for duration in seconds.values())


def test_ends_of_groups_and_indices_are_made_up_as_they_are_used():
    graph = fx.Graph()
    rows, weight, ends, index = (graph.placeholder(name) for name in ("rows", "weight", "ends", "index"))
    values = (
        torch.ones(8, 4),
        torch.ones(2, 4, 4),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(6, dtype=torch.int64),
    )
    for node, value in zip((rows, weight, ends, index), values, strict=True):
        node.meta["val"] = value
    graph.call_function(torch.ops.aten._grouped_mm.default, (rows, weight, ends))
    graph.call_function(torch.ops.aten.index.Tensor, (rows, [index]))
    assert timing._Uses(ends, None).values(2).tolist() == [4, 8]
    assert timing._Uses(index, None).values(10).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert timing._Uses(ends, set()).values(2).tolist() == [0, 0]
