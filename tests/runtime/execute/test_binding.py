"""What a planned graph calls in Python: for small operators, that is what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gate import slow
from injecting import Fault, inject
from twins import Net, python_calls_by_name, x

import zinf_fx
from zinf_fx.optim import AdamW
from zinf_fx.runtime.execute import binding
from zinf_fx.runtime.memory import process

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def training(placement: str, store: Path, layers: int, *faults: Fault) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a forward and backward pass of a model that has taken some steps, and a step of its optimizer. `faults`:
    of the store, from then on."""
    torch._dynamo.reset()
    model = zinf_fx.offload(Net(layers=layers), store=store, placement=placement)
    optimizer, call, batch = AdamW(model.parameters()), torch.compile(model, backend="zinf"), x()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        call(batch).backward()
        step()
    for fault in faults:
        inject(next(model.parameters()).stored.tiers.store, fault)
    return lambda: call(batch).backward(), step


@pytest.mark.parametrize("placement", [slow("device"), "host"])
def test_an_operator_is_told_where_it_begins_and_ends_and_nothing_else_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    monkeypatch.setattr(process, "_holds_little", False)  # which a budget leaves behind
    few, many = (python_calls_by_name(training(placement, tmp_path, layers)[0]) for layers in (5, 20))
    for_more = Counter({name: many[name] - few[name] for name in many})
    assert for_more["begin_operator"] == for_more["end_operator"] > 0
    among = ("__call__", "let_through", "advance", "has_work", "computed")  # the first is that of operations
    assert {name: for_more[name] for name in among} == dict.fromkeys(among, 0)


def test_work_in_the_background_goes_on_between_operators(tmp_path: Path) -> None:
    slow = Fault("completion", operation="read", delay=0.005, count=10**6)  # else the step may be over before forward
    run, step = training("nvme", tmp_path, 20, slow)
    run()
    step()
    calls = python_calls_by_name(run)
    assert calls["advance"] > 0


def test_operations_have_their_names_in_the_code_of_a_graph() -> None:
    """Tracebacks show it."""
    graph = torch.fx.Graph()
    value = graph.placeholder("value")
    graph.output(graph.call_function(binding._called_directly(torch.ops.aten.add.Tensor), (value, 1), {"alpha": 2}))
    module = torch.fx.GraphModule({}, graph)
    assert "aten_add_Tensor(value, 1, alpha = 2)" in module.code
    assert module(torch.ones(1)).item() == 3
