"""Products with a few values of a quantised matrix at a time are those with all of them."""

from __future__ import annotations

import pytest
import torch
from gate import slow

from zinf_fx import ops
from zinf_fx.quantisation import FORMATS, dequantised, quantised
from zinf_fx.runtime.execute import workspace


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, slow(torch.float16)], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(200, 192), (321, 1100)], ids=str)
def test_parts_give_the_same_bits(monkeypatch, shape, name, dtype, threads):
    """Of 128 rows or columns, of which the last part has fewer; the second shape is no multiple of a block."""
    monkeypatch.setattr(workspace, "_AT_A_TIME", 1)
    torch.manual_seed(0)
    (rows, columns), before = shape, torch.get_num_threads()
    packed = quantised(torch.randn(shape), name)
    values = dequantised(packed, (columns,), name, dtype)
    x, gradient, bias = (torch.randn(*size).to(dtype) for size in ((33, columns), (33, rows), (rows,)))
    torch.set_num_threads(threads)
    try:
        one_way = ops.quantised_mm(x, packed, columns, name, dtype, True)
        with_bias = ops.quantised_mm(x, packed, columns, name, dtype, True, bias=bias)
        other_way = ops.quantised_mm(gradient, packed, columns, name, dtype, False)
        assert torch.equal(one_way, x @ values.t())
        assert torch.equal(with_bias, torch.addmm(bias, x, values.t()))
        assert torch.equal(other_way, gradient @ values)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_begin_where_blocks_do(monkeypatch, name):
    """They do also where there is room for 200 columns at a time, and blocks have 32, 64 or 128."""
    monkeypatch.setattr(workspace, "_AT_A_TIME", 200 * 321 * 2)
    torch.manual_seed(0)
    packed = quantised(torch.randn(321, 1100), name)
    gradient = torch.randn(33, 321).bfloat16()
    product = ops.quantised_mm(gradient, packed, 1100, name, torch.bfloat16, False)
    assert torch.equal(product, gradient @ dequantised(packed, (1100,), name, torch.bfloat16))
