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
    (plan,), (found,) = planning.plans, planning.seconds
    assert any(tile.members for tile in plan.tiles) == (pack == "auto")
    assert set(found) == {(graph.kind, one.index) for graph in plan.graphs for one in graph.operators}
    assert all(found[graph.kind, one.index] > 0 for graph in plan.graphs for one in graph.operators if one.flops)


def test_compiled_regions_are_timed_as_they_run(monkeypatch):
    found = []
    measured = timing._measured
    monkeypatch.setattr(timing, "_measured", lambda *operator: found.append(operator[0]) or measured(*operator))
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        inputs = torch.zeros(3, 32)
    planning = plan_model(_Mean(model), (inputs,), placement="nvme", compute="inductor", timed=True)
    regions = [n.target for module in found for n in module.graph.nodes if isinstance(n.target, CompiledRegion)]
    assert len(regions) > 1 and all(one.is_compiled for one in regions)
    (plan,), (seconds,) = planning.plans, planning.seconds
    assert all(seconds[graph.kind, one.index] > 0 for graph in plan.graphs for one in graph.operators if one.flops)


class _Mean(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).mean()
