"""The passes together: a captured model's plan as text, every kind of graph, and random chains of operations."""

from __future__ import annotations

import logging
import operator
import re
import sys
from collections.abc import Callable
from textwrap import dedent
from types import FrameType
from typing import Any

import pytest
import torch
from gate import named
from hypothesis import given, settings
from hypothesis import strategies as st
from passes.building import Builder, aten
from passes.capturing import assert_passes_keep_values, compiled, train
from passes.models import CASES, Block, Expression, rows, trained
from passes.reference import assert_same
from torch import fx, nn

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.errors import PlanError
from zinf_fx.passes import pipeline
from zinf_fx.passes.ir.framework import event_of, nodes_calling
from zinf_fx.passes.ir.in_flight import Ledger, operators_in, spans
from zinf_fx.passes.ir.printer import print_graph
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.offload_gradients import OffloadGradients
from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.pipeline import plan_inference, schedule_of
from zinf_fx.passes.scheduling.prefetch import Prefetch
from zinf_fx.plan.schedule import PROLOGUE


def test_golden() -> None:
    """A captured step: the forward graph with what it starts for backward, and the backward graph."""
    members = {f"w{i}": torch.randn(4, 4) for i in range(3)}
    model = Expression(lambda m, x: (torch.relu(x @ m.w0) @ m.w1 @ m.w2).sum(), **members)
    record = train(model, torch.randn(2, 4))
    texts = [print_graph(record.planned[kind][0].graph, record.planned[kind][1]) for kind in ("forward", "backward")]
    assert texts[0] == dedent("""
        forward graph
        inputs
          w0 : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
          w1 : f32[4, 4] on nvme, gradient on host
          w2 : f32[4, 4] on nvme, gradient on host
        prologue
          fetch w0 at 155648  # lower_gathers
          upload w0  # lower_gathers
          allgather w0  # lower_gathers
          fetch w1 at 151552  # lower_gathers
          upload w1  # lower_gathers
          fetch w2 at 147456  # lower_gathers
        operator 0
          allgather w1  # lower_gathers
          upload w2  # lower_gathers
          %1 = wait w0 : f32[4, 4]  # lower_gathers
          %2 = aten.mm(%0, %1) : f32[2, 4]
          release w0  # lower_gathers
          %3 = aten.relu(%2) : f32[2, 4]
        operator 1
          allgather w2  # lower_gathers
          fetch w2 for backward at 147456  # prefetch
          %4 = wait w1 : f32[4, 4]  # lower_gathers
          %5 = aten.mm(%3, %4) : f32[2, 4]
          release w1  # lower_gathers
        operator 2
          upload w2 for backward  # prefetch
          fetch w1 for backward at 151552  # prefetch
          %6 = wait w2 : f32[4, 4]  # lower_gathers
          %7 = aten.mm(%5, %6) : f32[2, 4]
          release w2  # lower_gathers
          %8 = aten.sum(%7) : f32[]
          %9 = aten.t(%5) : f32[4, 2]
          %10 = aten.t(%0) : f32[4, 2]
        return %8, w0, w1, w2, %3, %9, %10
    """).lstrip("\n")
    assert texts[1] == dedent("""
        backward graph
        inputs
          w0 : f32[4, 4] on nvme, gradient on host
          w1 : f32[4, 4] on nvme, gradient on host
          w2 : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : f32[4, 2]
          %2 : f32[4, 2]
          %3 : f32[]
        prologue
          fetch w2 at 147456  # lower_gathers
          upload w2  # lower_gathers
          fetch w1 at 151552  # lower_gathers
        operator 0
          allgather w2  # lower_gathers
          upload w1  # lower_gathers
          %4 = aten.expand(%3, [2, 4]) : f32[2, 4]
          %5 = aten.mm(%1, %4) : f32[4, 4]
          %6 = reduce_scatter w2, %5 : f32[4, 4]  # reduce_gradients
        operator 1
          allgather w1  # lower_gathers
          %7 = wait w2 : f32[4, 4]  # lower_gathers
          %8 = aten.t(%7) : f32[4, 4]
          %9 = aten.mm(%4, %8) : f32[2, 4]
          release w2  # lower_gathers
          %10 = aten.t(%0) : f32[4, 2]
          %11 = aten.mm(%10, %9) : f32[4, 4]
          %12 = reduce_scatter w1, %11 : f32[4, 4]  # reduce_gradients
        operator 2
          offload w2, %6  # offload_gradients
          %13 = wait w1 : f32[4, 4]  # lower_gathers
          %14 = aten.t(%13) : f32[4, 4]
          %15 = aten.mm(%9, %14) : f32[2, 4]
          release w1  # lower_gathers
          %16 = aten.detach(%0) : f32[2, 4]
          %17 = aten.detach(%16) : f32[2, 4]
          %18 = aten.threshold_backward(%15, %17, 0) : f32[2, 4]
          %19 = aten.mm(%2, %18) : f32[4, 4]
          %20 = reduce_scatter w0, %19 : f32[4, 4]  # reduce_gradients
          offload w1, %12  # offload_gradients
          offload w0, %20  # offload_gradients
        return None, None, None, None
    """).lstrip("\n")


def test_every_graph_between_two_passes_is_printable(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = CASES["checkpointed_dropout"]()
    with caplog.at_level(logging.DEBUG, logger="zinf_fx.passes.pipeline"):
        record = train(model, *inputs)
    messages = [r.getMessage() for r in caplog.records if r.name == "zinf_fx.passes.pipeline"]
    assert [m.split(" (")[0] for m in messages] == [f"after {stage.pass_.name}" for stage in record.stages]
    assert all(m.splitlines()[1] == f"{stage.kind} graph" for m, stage in zip(messages, record.stages, strict=True))


def test_nothing_is_printed_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "print_graph", lambda graph, context: pytest.fail("printed"))
    train(*_flat(CASES["mlp"]()))


MANY_CHOICES = (
    "tied_far_apart",
    "split_and_unbind_of_a_weight",
    "weights_fetched_at_the_top",
    "concatenated_weights",
    "checkpointed_dropout",
    "selectively_checkpointed",
)


@pytest.mark.parametrize(
    "name", named(MANY_CHOICES, {"tied_far_apart", "selectively_checkpointed", "concatenated_weights"})
)
def test_plans_are_deterministic(name: str) -> None:
    """Every rank must make the same plan. PyTorch numbers the symbols of open sizes by what it captured before."""
    texts = []
    for record in (trained(name), train(*_flat(CASES[name]()))):
        graphs = [print_graph(module.graph, context) for module, context in record.planned.values()]
        texts.append([re.sub(r"\bs\d+\b", "s", graph) for graph in graphs])
    assert texts[0] == texts[1]


# -- kinds of graphs --------------------------------------------------------------------------------------------------


def test_inference() -> None:
    model, inputs = CASES["mlp"]()
    expected = model(*inputs)
    call, record = compiled(model)
    with torch.no_grad():
        assert_same(call(*inputs), expected.detach())
    assert record.planned.keys() == {"inference"}
    assert_passes_keep_values(record)


def test_one_forward_for_many_shapes() -> None:
    """Sizes are inputs of the graph, before and between the parameters."""
    model = Expression(lambda m, x, k: (m.layers(x) * x.shape[0] * k).sum(), layers=nn.Sequential(Block(), Block()))
    names = [name for name, _ in model.named_parameters()]
    call, record = compiled(model, dynamic=True)
    captures = []
    for length, factor in ((3, 2), (5, 6), (7, 9)):
        record.gradients.clear()
        eager = Expression(model.function, layers=nn.Sequential(Block(), Block()))
        eager.load_state_dict(record.parameters)
        x = torch.randn(length, 4)
        expected = eager(x, factor)
        expected.backward()
        loss = call(x, factor)
        loss.backward()
        assert_same(loss.detach(), expected.detach())
        assert_same(record.gradients, {name: p.grad for name, p in eager.named_parameters()})
        captures.append(record.captures)
    assert len(set(captures)) == 1, captures
    forward, context = record.planned["forward"]
    assert {tile.name for tile in context.tiles.values()} == set(names)
    assert any(isinstance(n.meta["val"], torch.SymInt) for n in forward.graph.find_nodes(op="placeholder"))
    assert "size s" in print_graph(forward.graph, context)
    assert_passes_keep_values(record)


def test_a_model_may_return_its_parameters() -> None:
    model = Expression(lambda m, x: (m.layer(x).sum(), m.layer.weight, m.layer.weight.t()[0]), layer=nn.Linear(4, 4))
    call, record = compiled(model)
    loss, weight, row = call(rows())
    loss.backward()
    assert weight is model.layer.weight
    assert_same(row.detach(), record.parameters["layer.weight"].t()[0])
    assert_passes_keep_values(record)


def test_an_empty_graph() -> None:
    built = Builder("inference")
    built.returns()
    plan_inference(fx.GraphModule({}, built.graph), built.context)
    assert built.text == "inference graph\nreturn\n"
    assert schedule_of(built.graph, built.context).events == ()


def test_a_graph_without_tiles() -> None:
    built = Builder("inference")
    x = built.input(2, 4)
    built.returns(built.call(aten.sin.default, x))
    built.run(SinkGathers(), Regions(), LowerGathers(), Prefetch())
    schedule = schedule_of(built.graph, built.context)
    assert (schedule.tiles, schedule.events, len(schedule.operators)) == ((), (), 1)


def test_the_schedule_says_what_the_graph_does() -> None:
    record = trained("tied_far_apart")
    for kind in ("forward", "backward"):
        module, context = record.planned[kind]
        schedule = schedule_of(module.graph, context)
        nodes = list(nodes_calling(module.graph, *ops.LOWERED))
        assert [(e.kind, schedule.tiles[e.tile].name, e.for_backward) for e in schedule.events] == [
            (str(n.target._opname), context.tile_of(n).name, event_of(n).for_backward) for n in nodes
        ]
        assert [o.index for o in schedule.operators] == list(range(operators_in(module.graph)))
        assert all(t.gradient_tier is not None for t in schedule.tiles)
        assert all(event is event_of(node) for event, node in zip(schedule.events, nodes, strict=True))


def test_one_budget_for_the_whole_step_names_the_graph_that_breaks_it() -> None:
    model, inputs = CASES["mlp"]()
    with pytest.raises(Exception, match="the backward graph needs") as error:
        train(model, *inputs, config=Config(placement="nvme", device_memory=130, tile=None))
    assert isinstance(error.value.inner_exception, PlanError)


# -- properties -------------------------------------------------------------------------------------------------------

SIZE = 4
# From a value of shape (4, 4) and a tile's, a value of shape (4, 4).
STEPS: dict[str, Callable[[Builder, fx.Node, fx.Node], fx.Node]] = {
    "mm": lambda b, x, w: b.call(aten.mm.default, x, w),
    "mm with a transposed weight": lambda b, x, w: b.call(aten.mm.default, x, b.call(aten.t.default, w)),
    "add a row": lambda b, x, w: b.call(aten.add.Tensor, x, b.call(aten.select.int, w, 0, 1)),
    "multiply by a part of a part": lambda b, x, w: b.call(
        aten.mul.Tensor,
        x,
        b.call(operator.getitem, b.call(aten.unbind.int, b.call(operator.getitem, _halves(b, w), 1)), 0),
    ),
    "mm with a cast": lambda b, x, w: b.call(
        aten._to_copy.default,
        b.call(aten.mm.default, _double(b, x), _double(b, w)),
        dtype=torch.float32,
    ),
    "pass on": lambda b, x, w: b.call(aten.view.default, w, [SIZE, SIZE]),
    "sine": lambda b, x, w: b.call(aten.sin.default, x),
}


def _halves(b: Builder, w: fx.Node) -> fx.Node:
    return b.call(aten.split.Tensor, w, 2)


def _double(b: Builder, value: fx.Node) -> fx.Node:
    return b.call(aten._to_copy.default, value, dtype=torch.float64)


@st.composite
def graphs(draw: st.DrawFn) -> Builder:
    """Draw a chain of operations over few tiles. Weights may be fetched long before they are used; some chains stop
    short, and some tiles' values are results or gradients."""
    count = draw(st.integers(1, 4))
    tiers = draw(st.lists(st.sampled_from(["nvme", "host", "device"]), min_size=count, max_size=count))
    kind = draw(st.sampled_from(["inference", "forward", "backward"]))
    names = [f"w{i}" for i in range(count)]
    tiles = {name: (SIZE, SIZE) for name in names}
    budget = draw(st.none() | st.integers(1, 12).map(lambda tiles: tiles * SIZE * SIZE * 4))
    prefetch = draw(st.none() | st.tuples(*[st.integers(0, 3)] * 3).map(lambda d: tuple(sorted(d))))
    built = Builder(kind, tiles, prefetch=prefetch, **({} if budget is None else {"device_memory": budget}))
    both = zip(built.context.tiles.items(), tiers, strict=True)
    built.knows(tiles={token: Builder.moved(tile, tier) for (token, tile), tier in both})
    values = [built.input(SIZE, SIZE)]
    early = {name: built.gather(name) for name in draw(st.lists(st.sampled_from(names), unique=True))}
    for _ in range(draw(st.integers(0, 12))):
        name = draw(st.sampled_from(names))
        weight = early[name] if name in early and draw(st.booleans()) else built.gather(name)
        source = draw(st.sampled_from(values[-2:]))
        values.append(STEPS[draw(st.sampled_from(list(STEPS)))](built, source, weight))
    results = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
    if kind == "backward":
        owners = draw(st.lists(st.sampled_from(names), max_size=len(results), unique=True))
        gradients = dict(enumerate(owners))
        built.returns(*results, gradients=gradients, backward=len(results))
    else:
        built.returns(*results)
    return built


@settings(max_examples=60, deadline=None)
@given(built=graphs())
def test_random_chains(built: Builder) -> None:
    """The specification holds after every pass, values stay the same, and bytes in flight stay within the budget."""
    passes: list[Any] = [SinkGathers(), Regions(), LowerGathers()]
    if built.context.kind == "backward":
        passes = [ReduceGradients(), *passes, OffloadGradients()]
    built.check_values(*passes)
    needed = Ledger(spans(built.graph, built.context), operators_in(built.graph), built.context.budget)
    prefetch = Prefetch(built.context.config.prefetch)
    if needed.over_budget() is not None:
        with pytest.raises(PlanError, match="raise device_memory or host_memory"):
            built.run(prefetch)
        return
    built.check_values(prefetch)
    count = operators_in(built.graph)
    ledger = Ledger(spans(built.graph, built.context), count, None)
    if built.context.budget is not None:
        assert all(ledger.at(operator) <= built.context.budget for operator in range(PROLOGUE, count))


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 6),
    distances=st.tuples(*[st.integers(0, 4)] * 3).map(lambda d: tuple(sorted(d))),
    tiles=st.none() | st.integers(1, 8),
    shared=st.booleans(),
)
def test_random_turns(depth: int, distances: tuple[int, int, int], tiles: int | None, shared: bool) -> None:
    """Forward and backward of a chain are hand-built: what forward starts is what backward needs in its prologue."""
    options = {} if tiles is None else {"device_memory": tiles * SIZE * SIZE * 4}
    names = [f"w{0 if shared and i == depth - 1 else i}" for i in range(depth)]
    made = []
    for kind, order in (("backward", names[::-1]), ("forward", names)):
        built = Builder(kind, dict.fromkeys(sorted(set(names)), (SIZE, SIZE)), prefetch=distances, **options)
        x = built.input(SIZE, SIZE)
        for name in order:
            x = built.call(aten.mm.default, x, built.gather(name))
        built.returns(x)
        made.append(built)
    backward, forward = made
    prefetch = Prefetch(distances)
    backward.check_values(SinkGathers(), Regions(), LowerGathers())
    forward.check_values(SinkGathers(), Regions(), LowerGathers())
    try:
        backward.check_values(prefetch)
    except PlanError as error:
        assert "raise device_memory" in str(error)
        return
    forward.knows(successor_prologue=prefetch.prologue(backward.graph, backward.context))
    forward.check_values(prefetch)
    for_backward = [
        (n.target, n.args[0].name) for n in nodes_calling(forward.graph, *ops.TRANSFERS) if event_of(n).for_backward
    ]
    due = [(transfer.op, forward.context.keys[transfer.tile].token) for transfer in forward.context.successor_prologue]
    assert set(for_backward) <= set(due) and len(for_backward) == len(set(for_backward))
    assert tiles is not None or set(for_backward) == set(due)


# -- growth -----------------------------------------------------------------------------------------------------------


def planned_calls(depth: int) -> int:
    """Python calls that the passes make for a graph of `depth` layers, each with a matrix and a vector of its own, and
    one tile that all layers use."""
    tiles = {f"w{i}": (SIZE, SIZE) for i in range(depth)} | {f"b{i}": (SIZE,) for i in range(depth)}
    built = Builder("backward", {**tiles, "shared": (SIZE, SIZE)}, device_memory=8 * SIZE * SIZE * 4)
    x = built.input(SIZE, SIZE)
    gradients = []
    for i in range(depth):
        x = built.call(aten.addmm.default, built.gather(f"b{i}"), x, built.gather(f"w{i}"))
        x = built.call(aten.add.Tensor, x, built.call(aten.select.int, built.gather("shared"), 0, 0))
        gradients.append(built.call(aten.sum.dim_IntList, x, [0]))
    built.returns(*gradients, gradients={i: f"b{i}" for i in range(depth)}, backward=depth)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        built.run(ReduceGradients(), SinkGathers(), Regions(), LowerGathers(), OffloadGradients(), Prefetch())
        schedule_of(built.graph, built.context)
    finally:
        sys.setprofile(None)
    return calls


def test_work_grows_linearly_with_depth() -> None:
    small, large = planned_calls(20), planned_calls(80)
    assert large < 4.4 * small


def _flat(case: tuple) -> tuple:
    model, inputs = case
    return (model, *inputs)
