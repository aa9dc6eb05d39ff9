"""offload_activations, reload_activations: tokens cross from forward to backward, and values come back unchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from textwrap import dedent

import pytest
import torch
from gate import named
from passes.capturing import Record, assert_trains_like_eager, compiled, train
from passes.models import CASES, SAVING, Expression
from torch import nn
from torch.nn import functional as F

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.passes.activations import offload as offload_activations
from zinf_fx.passes.ir.framework import nodes_calling
from zinf_fx.passes.ir.printer import print_graph, type_text

OFFLOAD = Config(placement="infinity-nvme", activations="offload")


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "SMALLEST", 1)


def text_after(record: Record, name: str) -> str:
    stage = record.stage(name)
    return print_graph(stage.after, stage.context_after)


def test_golden() -> None:
    torch.manual_seed(0)
    model = Expression(lambda m, x: m.b(m.a(x).tanh().t()).sum(), a=nn.Linear(4, 3, bias=False), b=nn.Linear(2, 2))
    record = train(model, torch.randn(2, 4), config=replace(OFFLOAD, pack=None))
    assert text_after(record, "offload_activations") == dedent(
        """\
        forward graph
        inputs
          a.weight : f32[3, 4] on nvme, gradient on host
          %0 : f32[2, 4]
          b.weight : f32[2, 2] on nvme, gradient on host
          b.bias : f32[2] on nvme, gradient on host
        nodes
          %1 = gather a.weight : f32[3, 4]
          %2 = aten.t(%1) : f32[4, 3]
          %3 = aten.mm(%0, %2) : f32[2, 3]
          %4 = aten.tanh(%3) : f32[2, 3]
          %5 = offload_activation %4 as activation:tanh : i64[]  # offload_activations
          %6 = aten.t(%4) : f32[3, 2]
          %7 = gather b.weight : f32[2, 2]
          %8 = aten.t(%7) : f32[2, 2]
          %9 = gather b.bias : f32[2]
          %10 = aten.addmm(%9, %6, %8) : f32[3, 2]
          %11 = aten.sum(%10) : f32[]
        return %11, a.weight, %0, b.weight, b.bias, %5
        """
    )
    assert text_after(record, "reload_activations") == dedent(
        """\
        backward graph
        inputs
          a.weight : f32[3, 4] on nvme, gradient on host
          %0 : f32[2, 4]
          b.weight : f32[2, 2] on nvme, gradient on host
          b.bias : f32[2] on nvme, gradient on host
          activation:tanh : f32[6] on nvme
          %1 : f32[]
        nodes
          %2 = gather activation:tanh : f32[6]  # reload_activations
          %3 = aten.as_strided(%2, [2, 3], [3, 1], 0) : f32[2, 3]  # reload_activations
          %4 = aten.expand(%1, [3, 2]) : f32[3, 2]
          %5 = aten.t(%4) : f32[2, 3]
          %6 = gather b.weight : f32[2, 2]
          %7 = aten.t(%6) : f32[2, 2]
          %8 = aten.mm(%7, %5) : f32[2, 3]
          %9 = aten.t(%8) : f32[3, 2]
          %10 = aten.t(%3) : f32[3, 2]
          %11 = aten.mm(%5, %10) : f32[2, 2]
          %12 = aten.t(%11) : f32[2, 2]
          %13 = aten.sum.dim_IntList(%4, [0], True) : f32[1, 2]
          %14 = aten.view(%13, [2]) : f32[2]
          %15 = reduce_scatter b.bias, %14 : f32[2]  # reduce_gradients
          %16 = aten.t(%12) : f32[2, 2]
          %17 = reduce_scatter b.weight, %16 : f32[2, 2]  # reduce_gradients
          %18 = aten.t(%9) : f32[2, 3]
          %19 = aten.detach(%3) : f32[2, 3]
          %20 = aten.detach(%19) : f32[2, 3]
          %21 = aten.tanh_backward(%18, %20) : f32[2, 3]
          %22 = aten.t(%21) : f32[3, 2]
          %23 = aten.mm(%22, %0) : f32[3, 4]
          %24 = aten.t(%23) : f32[4, 3]
          %25 = aten.t(%24) : f32[3, 4]
          %26 = reduce_scatter a.weight, %25 : f32[3, 4]  # reduce_gradients
        return %26, None, %17, %15
        """
    )


def saved_of(function: Callable[..., torch.Tensor], **members: object) -> tuple[list[str], list[str]]:
    """Names of the activations that leave, and types of the values that stay, of a model of one input."""
    record = train(Expression(function, **members), torch.randn(4, 6), config=OFFLOAD)
    forward, context = record.planned["forward"]
    results = next(iter(forward.graph.find_nodes(op="output"))).args[0][1:]
    kept = [type_text(n.meta["val"]) for n in results if n.op != "placeholder" and n.name not in context.tiles]
    return [tile.name for tile in context.tiles.values() if tile.activation], kept


def test_views_of_one_memory_leave_once() -> None:
    def function(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        a, b = m.layer(x).tanh().chunk(2, dim=1)
        return (a.sin() * b.t().reshape(4, 3).cos()).sum()

    left, kept = saved_of(function, layer=nn.Linear(6, 6))
    assert "activation:tanh" in left
    assert "f32[4, 3]" not in kept


def test_what_the_caller_gets_stays() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).tanh().flatten()

    model = Two()
    call, record = compiled(model, OFFLOAD)
    call(torch.randn(4, 6)).sum().backward()
    _, context = record.planned["forward"]
    assert not [tile.name for tile in context.tiles.values() if tile.activation]
    assert context.kept == 4 * 6 * 4


def test_what_is_small_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "SMALLEST", 4 * 6 * 4 + 1)
    left, kept = saved_of(lambda m, x: m.layer(x).tanh().sum(), layer=nn.Linear(6, 6))
    assert (left, kept) == ([], ["f32[4, 6]"])


def test_memory_with_holes_stays() -> None:
    assert offload_activations._is_dense(torch.empty(4, 6).t())
    assert offload_activations._is_dense(torch.empty(4, 1, 6)[:, 0])
    assert not offload_activations._is_dense(torch.empty(4, 6)[:, :3])
    assert not offload_activations._is_dense(torch.empty(1, 6).expand(4, 6))


def test_sizes_known_at_run_time_only_stay_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Expression(lambda m, x: m.layer(x).tanh().sum(), layer=nn.Linear(6, 6))
    call, record = compiled(model, OFFLOAD, dynamic=True)
    with caplog.at_level(logging.WARNING):
        call(torch.randn(4, 6)).backward()
    assert "1 activations stay on the device" in caplog.text and "dynamic=False" in caplog.text
    assert record.planned["forward"][1].kept == 4 * 6 * 4


def test_autograd_may_save_what_is_used_far_apart() -> None:
    """A value that backward uses at its beginning and at its end comes back once, or, under a budget, for each use."""
    function = lambda m, x: (m.b(F.gelu(m.a(x))).exp() * m.a(x)).sum()  # noqa: E731
    for budget in (None, "64KiB"):
        members = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}
        config = Config(placement="infinity-nvme", activations="offload", device_memory=budget)
        assert_trains_like_eager(Expression(function, **members), torch.randn(4, 6), config=config)


@pytest.mark.parametrize(
    "name", named(CASES, {*SAVING} - {"checkpointed_dropout", "views_of_views", "int_input_and_constant"})
)
def test_trains_like_eager(name: str) -> None:
    model, inputs = CASES[name]()
    record = assert_trains_like_eager(model, *inputs, config=OFFLOAD)
    if "forward" in record.planned:
        graph, context = record.planned["forward"][0].graph, record.planned["forward"][1]
        assert len(list(nodes_calling(graph, ops.offload_activation))) == sum(
            tile.activation for tile in context.tiles.values()
        )
