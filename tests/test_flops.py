"""Products that PyTorch's own counter doesn't count."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from zinf_fx.flops import _FORMULAS, seems_a_product
from zinf_fx.passes.ir import work
from zinf_fx.passes.ir.work import Work, total, work_of

aten = torch.ops.aten


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def _int8(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int8)


def _offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _work(call: Callable[..., object], *tensors: torch.Tensor) -> Work:
    graph = make_fx(call, tracing_mode="fake")(*tensors).graph
    return total(map(work_of, graph.nodes), fused=False)


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attended_and_back(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    query = query.detach().requires_grad_()
    return torch.autograd.grad(_attended(query, key.detach().requires_grad_(), value).sum(), query)


HEADS = (torch.ones(2, 4, 6, 8), torch.ones(2, 4, 10, 8), torch.ones(2, 4, 10, 8))


@pytest.mark.parametrize(
    ("call", "tensors", "flops", "dtype"),
    [
        # Rows, columns or summands in groups; groups of each operand.
        (torch._grouped_mm, (_bf16(64, 32), _bf16(4, 32, 16), _offsets(8, 16, 16, 64)), 2 * 64 * 32 * 16, "bfloat16"),
        (torch._grouped_mm, (_bf16(4, 16, 32), _bf16(32, 64), _offsets(16, 32, 48, 64)), 2 * 16 * 32 * 64, "bfloat16"),
        (torch._grouped_mm, (_bf16(16, 64), _bf16(64, 32), _offsets(16, 32, 48, 64)), 2 * 16 * 64 * 32, "bfloat16"),
        (torch._grouped_mm, (_bf16(4, 16, 32), _bf16(4, 32, 64)), 4 * 2 * 16 * 32 * 64, "bfloat16"),
        (torch._int_mm, (_int8(32, 16), _int8(16, 8)), 2 * 32 * 16 * 8, "int8"),
        (aten._weight_int8pack_mm, (_bf16(32, 16), _int8(8, 16), _bf16(8)), 2 * 32 * 16 * 8, "bfloat16"),
        (torch.mv, (torch.ones(6, 4), torch.ones(4)), 2 * 6 * 4, "float32"),
        (torch.addmv, (torch.ones(6), torch.ones(6, 4), torch.ones(4)), 2 * 6 * 4, "float32"),
        (torch.dot, (torch.ones(6), torch.ones(6)), 2 * 6, "float32"),
        (torch.addbmm, (torch.ones(3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5, "float32"),
        (aten._addmm_activation, (torch.ones(5), torch.ones(3, 4), torch.ones(4, 5)), 2 * 3 * 4 * 5, "float32"),
        (_attended, HEADS, 2 * 2 * 4 * 6 * 10 * (8 + 8), "float32"),
        (_attended_and_back, HEADS, 2 * 2 * 4 * 6 * 10 * (2 * 8 + 5 * 8), "float32"),
        (torch.conv_tbc, (torch.ones(7, 2, 3), torch.ones(2, 3, 5), torch.ones(5)), 2 * 6 * 2 * 5 * 2 * 3, "float32"),
        (F.bilinear, (torch.ones(2, 3), torch.ones(2, 4), torch.ones(5, 3, 4)), 3 * 2 * 5 * 3 * 4, "float32"),
        (aten._cdist_forward, (torch.ones(6, 3), torch.ones(5, 3), 2.0, None), 3 * 6 * 3 * 5, "float32"),
    ],
)
def test_products_are_counted(call: Callable, tensors: tuple[torch.Tensor, ...], flops: int, dtype: str) -> None:
    counted = _work(lambda *given: call(*given), *tensors)
    assert (counted.flops, counted.dtype) == (flops, getattr(torch, dtype)) and counted.product_bytes


def test_an_encoder_layer_in_one_operator_counts_as_its_parts() -> None:
    layer, x = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), torch.ones(2, 6, 32)
    besides = {getattr(aten, name.removeprefix("aten::"), None): formula for name, formula in _FORMULAS.items()}
    counted = []
    for fast in (True, False):
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=besides) as counter:
                layer(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_experts_of_transformers_are_counted() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    fallback = torch.ops.transformers.grouped_mm_fallback

    def step(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = left.detach().requires_grad_(), right.detach().requires_grad_()
        return torch.autograd.grad(fallback(left, right, offsets).sum(), (left, right))

    assert moe and _work(step, torch.ones(8, 4), torch.ones(2, 4, 6), _offsets(3, 8)).flops == 3 * 2 * 8 * 4 * 6


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    work._warn_of_uncounted.cache_clear()
    caplog.set_level(logging.WARNING, logger="zinf_fx")
    return lambda: caplog.text


@torch.library.custom_op("zinf_test_flops::fused", mutates_args=())
def _fused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


@_fused.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], y.shape[1])


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: torch.ops.zinf_test_flops.fused(x, x), "zinf_test_flops::fused"),
        (torch.linalg.inv, "aten::linalg_inv_ex"),
        (torch.linalg.qr, "aten::linalg_qr"),
    ],
)
def test_a_product_without_a_formula_is_warned_of_once(call: Callable, name: str, warned: Callable[[], str]) -> None:
    for _ in range(2):
        assert not _work(call, torch.eye(4)).flops
    assert warned().count(f"the arithmetic of {name} isn't counted, because it has no formula") == 1
    assert "register_flop_formula" in warned()


def test_a_formula_that_raises_is_warned_of(monkeypatch: pytest.MonkeyPatch, warned: Callable[[], str]) -> None:
    def raises(*args: object, **kwargs: object) -> int:
        raise AssertionError("heads differ")

    monkeypatch.setattr(work, "formula_of", lambda target: raises)
    assert not _work(torch.mm, torch.ones(2, 2), torch.ones(2, 2)).flops
    assert "a formula that raised AssertionError: heads differ" in warned()


def test_sizes_of_run_time_are_warned_of(warned: Callable[[], str]) -> None:
    def selected(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x[mask.nonzero()[:, 0]] @ x.t()

    graph = make_fx(selected, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.ones(4, 4), torch.ones(4))
    assert not total(map(work_of, graph.graph.nodes), fused=False).flops
    assert "aten::mm isn't counted, because it has sizes that are known at run time only" in warned()


def test_what_has_no_product_is_not_warned_of(warned: Callable[[], str]) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(torch.softmax(x, -1), (4,)) * torch.sigmoid(x)
        x = x.sort().values.cumsum(0).index_select(0, torch.arange(3, device=x.device))
        return F.interpolate(x[None, None], scale_factor=2, mode="bilinear").to(torch.float64)

    _work(call, torch.ones(4, 4))
    assert not warned()


def test_what_contains_a_graph_seems_a_product() -> None:
    assert seems_a_product(torch.ops.higher_order.cond, 1) and not seems_a_product(torch.ops.higher_order.cond, 0)
    assert not seems_a_product(fx.Node.format_node, 2)
