"""Plain values go through JSON and come back."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_fx.checkpoint.values import INLINE, decode, encode
from zinf_fx.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    kept: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, what: str) -> str:
        kept[what] = tensor
        return what

    return decode(json.loads(json.dumps(encode(value, "value", keep), allow_nan=False)), kept.__getitem__)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@given(plain)
def test_any_plain_value(value: Any):
    loaded = there_and_back(value)
    assert loaded == value and repr(loaded) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        random.getstate(),
        Counter({30: 1, 80: 2}),
        OrderedDict([("b", 1), ("a", 2)]),
        deque([1.5, 2.5]),
        deque([1, 2], maxlen=2),
        deque(maxlen=0),
        bytearray(b"ab"),
        {1, 2, 3},
        frozenset("ab"),
        torch.Size([2, 3]),
        {"$tuple": 1},
        {("a", 1): 2, None: 3},
        1 + 2j,
        [math.inf, -math.inf],
        torch.bfloat16,
        torch.device("cuda:1"),
        2**200,
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_other_types(value: Any):
    loaded = there_and_back(value)
    assert loaded == value and type(loaded) is type(value)
    assert getattr(loaded, "maxlen", None) == getattr(value, "maxlen", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (INLINE + 1,)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]):
    value = (torch.randn(shape) * 3).to(dtype)
    with torch.device("meta"):  # what torch makes tensors on when nothing else is said does not matter
        loaded = there_and_back({"x": value})["x"]
    assert loaded.dtype == dtype and loaded.shape == value.shape
    assert torch.equal(
        loaded.view(torch.uint8) if shape else loaded.float(), value.view(torch.uint8) if shape else value.float()
    )


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint1])
def test_tensors_that_pytorch_cannot_copy_by_value(dtype: torch.dtype):
    codes = torch.arange(6, dtype=torch.uint8)
    loaded = there_and_back(codes.view(dtype))
    assert loaded.dtype == dtype and torch.equal(loaded.view(torch.uint8), codes)


@pytest.mark.parametrize("size", [1, INLINE])
def test_what_is_conjugated_or_negated_lazily_has_its_values(size: int):
    value = torch.full((size,), 1 + 2j).conj()
    loaded = there_and_back([value, value.imag])
    assert value.is_conj() and value.imag.is_neg()
    assert torch.equal(loaded[0], value) and torch.equal(loaded[1], value.imag)


@pytest.mark.parametrize("value", [numpy.longdouble(1), numpy.arange(3, dtype=">i4")])
def test_dtypes_of_numpy_that_torch_lacks_are_refused(value: Any):
    with pytest.raises(CheckpointError, match=r"value.x is of numpy's dtype '.*', which can't be saved"):
        there_and_back({"x": value})


def test_nan_and_numpy():
    assert math.isnan(there_and_back(math.nan))
    state = numpy.random.get_state()
    loaded = there_and_back(state)
    assert loaded[0] == state[0] and (loaded[1] == state[1]).all() and loaded[1].dtype == state[1].dtype
    assert type(there_and_back(numpy.float32(1.5))) is numpy.float32
    numpy.random.set_state(loaded)


@pytest.mark.parametrize(
    "value",
    [
        {"$code": "print()"},
        {"$tensor": ["float32", [2], "AAAA"]},
        {"$dtype": "load"},
        {"$tensor": 3},
        {"$bounded": [[1], -1]},
    ],
)
def test_what_is_no_value_is_refused(value: Any):
    with pytest.raises(CheckpointError, match="can't be read"):
        decode(value, {}.__getitem__)
