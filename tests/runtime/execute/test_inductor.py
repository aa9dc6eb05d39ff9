"""A region is compiled once for all that are equal, and runs with PyTorch's kernels where that goes wrong."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import zinf_fx
from zinf_fx.errors import ConfigError
from zinf_fx.runtime.execute import inductor
from zinf_fx.runtime.execute.binding import Here, bind
from zinf_fx.runtime.execute.inductor import CompiledRegion, compiled_region, what_computes

Function = Callable[..., Sequence[Tensor]]


def captured(function: Function, *inputs: Tensor) -> fx.GraphModule:
    """Return the function as a region's module is."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    module = make_fx(function)(*(mode.from_tensor(tensor, static_shapes=True) for tensor in inputs))
    output = module.graph.output_node()
    output.meta["val"] = tuple(node.meta["val"] for node in output.args[0])
    return module


def places(tensors: Sequence[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_results_lie_as_captured_and_share_no_memory() -> None:
    """Copies, sums with zero and operations that come twice are results of their own; strides are those of PyTorch's
    kernels, where Inductor's would be others."""

    def compute(x: Tensor, empty: Tensor) -> list[Tensor]:
        turned = torch.cat([empty, torch.tanh(x).transpose(1, 2)])
        return [torch.tanh(x), torch.tanh(x), torch.tanh(x).clone(), x.clone(), x + 0, turned]

    x, empty = torch.randn(2, 3, 4), torch.empty(0)
    region = CompiledRegion(captured(compute, x, empty), "a test")
    for _ in range(2):
        inputs = [x, empty]
        results = region(inputs)
        assert not inputs and region.is_compiled
        assert len(places([x, *results])) == 7
        for result, expected in zip(results, compute(x, empty), strict=True):
            torch.testing.assert_close(result, expected)
            assert result.stride() == expected.stride()


def test_equal_regions_share_what_is_compiled_and_files_keep_it() -> None:
    def compute(x: Tensor) -> list[Tensor]:
        return [torch.exp(x).sum(1) * 3]

    module = captured(compute, torch.ones(5, 7))
    region = compiled_region(module, "text", "one")
    assert compiled_region(captured(compute, torch.ones(5, 7)), "text", "other") is region
    assert region.is_compiled
    del region
    gc.collect()
    before = dict(counters["inductor"])
    compiled_region(module, "text", "one")
    assert counters["inductor"]["fxgraph_cache_hit"] == before.get("fxgraph_cache_hit", 0) + 1
    assert counters["inductor"]["fxgraph_cache_miss"] == before.get("fxgraph_cache_miss", 0)


def test_inputs_of_one_type_are_told_apart() -> None:
    """Nodes of a graph may share what describes their values."""
    module = captured(lambda x, y: [torch.tanh(x), torch.tanh(y)], torch.ones(3), torch.ones(3))
    x, y = module.graph.find_nodes(op="placeholder")
    y.meta["val"] = x.meta["val"]
    region = CompiledRegion(module, "a test")
    ones, twos = region([torch.full((3,), 1.0), torch.full((3,), 2.0)])
    assert region.is_compiled and ones.tolist() < twos.tolist()


def test_a_result_in_another_shape_is_viewed_in_the_one_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stands in for code that Inductor makes for a GPU alone: a sum over rows that shares a kernel with one over
    columns comes without the dimensions that it keeps."""
    x = torch.randn(2, 3, 2, 2)

    def compute(x: Tensor) -> list[Tensor]:
        return [x.sum([0, 1], keepdim=True), x.sum(-1), x[..., :1].sum([0, 1], keepdim=True)]

    def compiled(inputs: list[Tensor]) -> list[Tensor]:
        kept, other, narrow = compute(inputs.pop())
        return [kept.flatten(), other, narrow.flatten()]

    monkeypatch.setattr(inductor, "_compiled", lambda module: compiled)
    region = CompiledRegion(captured(compute, x), "operator 1 of backward (mm)")
    with caplog.at_level(logging.WARNING, "zinf_fx"):
        for _ in range(2):
            results, expected = region([x]), compute(x)
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
            assert [result.stride() for result in results] == [result.stride() for result in expected]
            assert len(places([x, *results])) == 4
    assert region.is_compiled and not caplog.records


def _raises(inputs: list) -> list[Tensor]:
    inputs.clear()
    raise AssertionError("expected size 2==3")


@pytest.mark.parametrize(
    ("compiled", "why"),
    [
        (lambda inputs: [inputs[0], inputs[0] * 2], "result 0 of its compiled code shares memory with an input"),
        (lambda inputs: [inputs[0] + 1] * 2, "result 1 of its compiled code shares memory with"),
        (lambda inputs: [(inputs[0] + 1).t().contiguous().t(), inputs[0] * 2], "strides (1, 2), not (2, 3) and (3, 1)"),
        (lambda inputs: [(inputs[0] + 1)[0], inputs[0] * 2], "shape (3,) and strides (1,), not (2, 3) and (3, 1)"),
        (lambda inputs: [(inputs[0] + 1).t().contiguous(), inputs[0] * 2], "strides (2, 1), not (2, 3) and (3, 1)"),
        (lambda inputs: [(inputs[0] + 1).t(), inputs[0] * 2], "shape (3, 2) and strides (1, 3), not (2, 3) and (3, 1)"),
        (_raises, "its compiled code raised AssertionError: expected size 2==3"),
        (None, "Inductor can't compile it: RuntimeError: no such operation"),
    ],
    ids=["an input", "one twice", "other strides", "too few", "transposed", "turned", "raises", "is not compiled"],
)
def test_what_goes_wrong_runs_with_pytorchs_kernels_and_is_said_once(
    compiled: Function | None, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_region(module: fx.GraphModule) -> Function:
        if compiled is None:
            raise RuntimeError("no such operation\nwith details")
        return compiled

    monkeypatch.setattr(inductor, "_compiled", compile_region)
    x = torch.randn(2, 3)
    region = CompiledRegion(captured(lambda x: [x + 1, x * 2], x), "operator 3 of forward (mm)")
    with caplog.at_level(logging.WARNING, "zinf_fx"):
        for _ in range(2):
            results = region([x])
            assert torch.equal(results[0], x + 1) and torch.equal(results[1], x * 2)
    assert not region.is_compiled
    (message,) = [record.getMessage() for record in caplog.records] or [""]
    assert message.startswith("operator 3 of forward (mm) runs with PyTorch's own kernels") and why in message


def test_an_error_that_the_inputs_are_to_blame_for_is_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_compiled", lambda module: _raises)
    region = CompiledRegion(captured(lambda x: [x.view(6)], torch.ones(2, 3)), "a test")
    with pytest.raises(RuntimeError, match="shape '\\[6\\]' is invalid"):
        region([torch.ones(5)])
    assert region.is_compiled


def test_a_value_that_nothing_else_needs_dies_inside_of_the_region() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    value = graph.call_function(torch.exp, (x,))
    result = graph.call_function(torch.neg, (value, x), name="region")
    graph.output((result, x))
    alive = []

    def region(inputs: list[Tensor]) -> Tensor:
        references = list(map(weakref.ref, inputs))
        inputs.clear()
        alive.extend(reference() is not None for reference in references)
        return torch.zeros(1)

    here = Here(frozenset(), frozenset(), frozenset(), followed=False, searches_for_nan=False)
    bound = bind(fx.GraphModule({}, graph), (), {"exp": 0, "region": 0}, here, {}, {"region": region})
    bound(mock.MagicMock(), [torch.ones(1)])
    assert alive == [False, True]  # the value, and an input that is a result


@inductor_config.patch({"cpp.cxx": ("no-such-compiler",)})
def test_without_a_compiler_nothing_is_changed() -> None:
    model = torch.nn.Linear(2, 2)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="zinf", options={"compute": "inductor", "placement": "host"})
    with pytest.raises(ConfigError, match="compute='inductor' needs a C\\+\\+ compiler"):
        compiled(torch.ones(1, 2))
    assert type(model.weight) is torch.nn.Parameter
    with pytest.raises(ConfigError, match="compute='triton' is not accepted; accepted: 'auto', 'eager', 'inductor'"):
        zinf_fx.Config(compute="triton")


@pytest.mark.parametrize(
    ("compute", "device", "has_triton", "expected"),
    [
        ("auto", "cpu", True, "eager"),
        ("auto", "meta", True, "eager"),
        ("auto", "cuda:1", True, "inductor"),
        ("auto", "cuda", False, "eager"),
        ("eager", "cuda", True, "eager"),
        ("inductor", "cpu", False, "inductor"),
    ],
)
def test_inductor_computes_by_itself_on_a_gpu_that_it_can_compile_for(
    compute: str, device: str, has_triton: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: has_triton)
    assert what_computes(compute, [torch.device("cpu"), torch.device(device)]) == expected


@inductor_config.patch({"cpp.cxx": ("no-such-compiler",)})
def test_that_inductor_has_no_compiler_for_a_gpu_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    inductor._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "zinf_fx"):
        assert [what_computes("auto", [torch.device("cuda")]) for _ in range(2)] == ["eager"] * 2
    (record,) = caplog.records
    assert "PyTorch's own kernels compute on the GPU" in record.getMessage() and "install g++" in record.getMessage()


def test_a_plan_says_what_computes_where_it_was_left_open() -> None:
    plan = zinf_fx.export_plan(torch.nn.Linear(2, 2), (torch.ones(1, 2),), placement="nvme")
    assert zinf_fx.Config().compute == "auto" and plan.config.compute == "eager"
