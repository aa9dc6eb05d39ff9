"""The formats of frozen weights have so many bytes per value; these come back, from the right bytes."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from zinf_fx import ops
from zinf_fx.config import FrozenDtype
from zinf_fx.quantisation import FORMATS, _dequantise, can_be_quantised, dequantised, quantised, quantised_shape

SHAPES = [(8, 64), (3, 1), (5, 70), (2, 3, 129), (4, 4096)]


def test_options_name_the_formats():
    assert set(get_args(FrozenDtype)) == set(FORMATS)


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [
        ("int8", (10, 64), 10 * (64 + 4)),
        ("int8", (10, 63), 10 * (64 + 4)),
        ("fp8", (2, 3, 65), 2 * 3 * (68 + 4)),
        ("nf4", (10, 64), 10 * (32 + 4)),
        ("nf4", (10, 65), 10 * (64 + 8)),
        ("nf4", (4096, 4096), 4096 * (2048 + 256)),
        ("fp8_block", (10, 129), 10 * (132 + 2 * 4)),
        ("mxfp4", (10, 65), 10 * (48 + 3)),
    ],
)
def test_bytes(name, shape, nbytes):
    assert math.prod(quantised_shape(shape, name)) == nbytes


WORTH_IT = {
    "matrix": (torch.empty(3, 64), True),
    "experts": (torch.empty(2, 3, 64, dtype=torch.bfloat16), True),
    "vector": (torch.empty(64), False),
    "nothing": (torch.empty(0, 64), False),
    "short rows": (torch.empty(64, 63), False),
    "kernel of Conv1d": (torch.nn.Conv1d(64, 64, 3).weight, False),
    "kernel of Conv2d": (torch.nn.Conv2d(64, 64, 3).weight, False),
    "integers": (torch.empty(3, 64, dtype=torch.int32), False),
    "bytes already": (torch.empty(3, 64, dtype=torch.float8_e4m3fn), False),
}


@pytest.mark.parametrize("what", WORTH_IT)
def test_what_is_quantised_is_smaller_then(what):
    tensor, is_smaller = WORTH_IT[what]
    assert can_be_quantised(tensor) == is_smaller
    if is_smaller:
        assert all(math.prod(quantised_shape(tensor.shape, name)) < tensor.nbytes for name in FORMATS)


# By format, how far a value may be from its own, as a part of its block's largest magnitude: half the widest gap
# between neighbours of the table, half a step of 1/127, and half of three bits behind the leading one; of mxfp4, what
# lies above 6, up to 8.
LARGEST_ERRORS = {"int8": 0.5 / 127, "fp8": 2**-4, "fp8_block": 2**-4, "nf4": (1.0 - 0.6961928009986877) / 2}
LARGEST_ERRORS["mxfp4"] = 2 / 8


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_values_come_back_within_half_a_step(name, shape):
    torch.manual_seed(0)
    value = torch.randn(shape) * torch.rand(shape[:-1]).unsqueeze(-1) * 100
    packed = quantised(value, name)
    with torch.device("meta"):  # what torch makes tensors on when nothing else is said does not matter
        assert torch.equal(quantised(value, name), packed)
    assert packed.dtype == torch.uint8 and packed.shape == quantised_shape(shape, name)
    back = dequantised(packed, shape[1:], name, torch.float32)
    block = FORMATS[name].block or shape[-1]
    padded = torch.nn.functional.pad(value, (0, -shape[-1] % block)).unflatten(-1, (-1, block))
    largest = padded.abs().amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., : shape[-1]]
    assert ((back - value).abs() <= LARGEST_ERRORS[name] * 1.0001 * largest).all()
    if name != "mxfp4":
        assert (back.abs().amax(-1) - value.abs().amax(-1)).abs().max() < 1e-5 * 100
    zeros = quantised(torch.zeros(shape), name)
    assert dequantised(zeros, shape[1:], name, torch.bfloat16).abs().max() == 0


def test_the_values_of_each_code_of_nf4():
    """They are worked out by hand: the table has 16 values, and the high half of a byte is the first value."""
    packed = torch.zeros(1, 36, dtype=torch.uint8)
    packed[0, :8] = torch.tensor([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF], dtype=torch.uint8)
    packed[0, 32:].view(torch.float32).fill_(2.0)
    values = dequantised(packed, (16,), "nf4", torch.float32)[0]
    assert values[0] == -2 and values[7] == 0 and values[15] == 2
    # QLoRA, appendix E: quantiles of the normal distribution, between 1 - offset and 1/2, on each side of zero.
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(0.5, offset, 9)[1:])
    below = -normal.icdf(torch.linspace(0.5, offset, 8)[1:]).flip(0)
    expected = torch.cat([below, torch.zeros(1), above]) / above[-1]
    assert torch.allclose(values / 2, expected, atol=1e-4)


def test_the_values_of_each_code_of_mxfp4():
    """They are worked out by hand, from OCP Microscaling Formats, sections 5.3.3 and 5.4.1: E2M1, and an exponent with
    a bias of 127."""
    packed = torch.zeros(3, 17, dtype=torch.uint8)
    packed[:, :8] = torch.tensor([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF], dtype=torch.uint8)
    packed[:, 16] = torch.tensor([129, 0, 255], dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # two of native code, one of torch
        values = dequantised(packed, (32,), "mxfp4", dtype)
        of_codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        assert torch.equal(values[0, :16], 4 * torch.cat([of_codes, -of_codes]).to(dtype))
        assert values[0, 8].signbit() and values[2].isnan().all()
        assert torch.equal(values[1, :16].float(), (2.0**-127 * torch.cat([of_codes, -of_codes])).to(dtype).float())


def test_values_between_two_codes_of_mxfp4_become_the_even_one():
    """They are worked out by hand: the scale of a block is the power of two of its largest magnitude, over that of
    4."""
    value = torch.zeros(2, 32)
    value[0, :9] = torch.tensor([4.0, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 7.9])
    value[1, :3] = torch.tensor([1.0, 0.7, 1.99])
    packed = quantised(value, "mxfp4")
    assert packed[:, 16].tolist() == [127, 125]
    back = dequantised(packed, (32,), "mxfp4", torch.float32)
    assert back[0, :9].tolist() == [4.0, 0.0, 1.0, -1.0, 2.0, 2.0, -4.0, 4.0, 6.0]
    assert back[1, :3].tolist() == [1.0, 0.75, 1.5]


def test_what_was_rounded_to_mxfp4_is_not_rounded_again():
    """Whatever the scale was, where it is none of the smallest, or largest."""
    torch.manual_seed(0)
    packed = torch.randint(256, (64, 68), dtype=torch.uint8)
    packed[:, 64:] = torch.randint(3, 250, (64, 4))
    values = dequantised(packed, (128,), "mxfp4", torch.float32)
    assert torch.equal(dequantised(quantised(values, "mxfp4"), (128,), "mxfp4", torch.float32), values)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_dequantised_by_themselves(name):
    torch.manual_seed(0)
    value = torch.randn(6, 3, 100, dtype=torch.bfloat16)
    packed = quantised(value, name)
    whole = ops.dequantize(packed, (3, 100), name, torch.bfloat16)
    assert torch.equal(whole[2:5], ops.dequantize(packed[2:5], (3, 100), name, torch.bfloat16))
    assert torch.equal(packed[2:5], quantised(value[2:5], name))
    again = ops.dequantize(packed, (3, 100), name, torch.float32)
    assert torch.equal(whole, again.bfloat16())


def test_large_matrices_are_done_in_parts_with_the_same_result():
    torch.manual_seed(0)
    value = torch.randn(1000, 1024)
    packed = quantised(value, "nf4")
    rows = torch.cat([quantised(row[None], "nf4") for row in value[::100]])
    assert torch.equal(packed[::100], rows)
    whole = dequantised(packed, (1024,), "nf4", torch.float32)
    assert torch.equal(whole[::100], dequantised(rows, (1024,), "nf4", torch.float32))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("name", FORMATS)
def test_values_that_no_format_has_are_refused(name, bad):
    value = torch.ones(2, 4)
    value[1, 2] = bad
    with pytest.raises(ValueError, match=f"can't be stored as {name}"):
        quantised(value, name)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [*SHAPES, (1001, 1100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_native_values_are_those_of_torch(name, dtype, shape, threads):
    """Other devices and dtypes take the values that PyTorch's operations compute."""
    torch.manual_seed(0)
    packed, before = quantised(torch.randn(shape), name), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        native = dequantised(packed, shape[1:], name, dtype)
    finally:
        torch.set_num_threads(before)
    runs = packed.view(-1, FORMATS[name].row_nbytes(shape[-1]))
    expected = torch.empty(len(runs), shape[-1], dtype=dtype)
    _dequantise(runs, expected, FORMATS[name])
    assert torch.equal(native, expected.view(shape))
