"""Codes of 8 bits with scales of blocks: the maps, the native code, and states that are kept so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import slow

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError
from zinf_fx.optim import formats
from zinf_fx.optim.formats import companion_of, decode, encode
from zinf_fx.sizes import BLOCK

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import default_dtype

STATES = ("exp_avg", "exp_avg_sq")


def coded(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a state."""
    buffers = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(-(-values.numel() // BLOCK))
    encode(name, values.flatten(), *buffers)
    return buffers


def rounded(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return what is left of a state's values when they were codes."""
    return decode(name, *coded(name, values), torch.empty(values.numel())).view(values.shape)


def values_of(name: str, state: dict[str, Any]) -> torch.Tensor:
    """Return the values of a state that an optimizer shows, in the parameter's shape."""
    codes, scales = (state[key].full_tensor() for key in (name, companion_of(name)))
    return decode(name, codes.flatten(), scales, torch.empty(codes.numel())).view(codes.shape)


DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "another device": lambda: torch.device("meta"),
}


def test_the_maps_are_those_of_dynamic_quantisation() -> None:
    signed, unsigned = formats._numbers(True), formats._numbers(False)
    assert len(set(signed)) == len(set(unsigned)) == 256
    # As bitsandbytes.functional.create_dynamic_map has them.
    assert (signed[0], signed[127], signed[-2], signed[-1]) == pytest.approx((-0.99296875, 0, 0.99296875, 1))
    assert unsigned[:3] + unsigned[-2:] == pytest.approx([0, 3.25e-7, 7.75e-7, 0.996484375, 1])
    assert signed[128] == pytest.approx(5.5e-7)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 100_003])
def test_codes_are_the_nearest(name: str, count: int) -> None:
    torch.manual_seed(count)
    values = torch.randn(count) * torch.exp(4 * torch.randn(count))
    values = values.abs() if name == "exp_avg_sq" else values
    codes, scales = coded(name, values)
    blocks = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    assert torch.equal(scales, blocks.abs().amax(-1))
    table = torch.tensor(formats._numbers(name == "exp_avg"))
    divided = values / scales.repeat_interleave(BLOCK)[:count]
    distances = (divided[:2000, None] - table).abs()
    assert torch.equal(distances.gather(1, codes[:2000, None].long())[:, 0], distances.amin(-1))
    bounds = (table[1:] + table[:-1]) / 2
    assert torch.equal(codes.long(), torch.bucketize(divided, bounds))
    expected = table[codes.long()] * scales.repeat_interleave(BLOCK)[:count]
    assert torch.equal(decode(name, codes, scales, torch.empty(count)), expected)


@pytest.mark.parametrize("name", STATES)
def test_zeros_stay_and_what_is_not_finite_makes_a_block_nan(name: str) -> None:
    values = torch.zeros(3 * BLOCK)
    assert torch.equal(rounded(name, values), values)
    values[5], values[BLOCK + 5] = torch.inf, torch.nan
    assert rounded(name, values).isnan().view(3, BLOCK).all(-1).tolist() == [True, True, False]


@pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)
@pytest.mark.parametrize("name", STATES)
def test_codes_do_not_depend_on_the_defaults_of_torch(name: str, default: Callable, request) -> None:
    values = torch.linspace(0, 1, 1000)
    expected = coded(name, values)
    tables = formats._table, formats._bounds, formats._first
    for table in tables:
        table.cache_clear()
        request.addfinalizer(table.cache_clear)
    buffers = [torch.empty_like(tensor) for tensor in expected]
    with default():
        encode(name, values, *buffers)
    assert all(map(torch.equal, buffers, expected))


OPTIMIZERS = {"AdamW": {"amsgrad": True}, "SGD": {"lr": 0.1, "momentum": 0.9}, "NAdam": {}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", [slow("device"), "host", "nvme"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bitwise_equal_to_an_explicit_loop(twins, name: str, placement: str, dtype: torch.dtype) -> None:
    """It is equal in chunks, packs and pieces, and in any placement: states in memory, whose codes are taken after each
    step."""
    pair = twins(placement, dtype, pack="auto")
    optimizer = getattr(optim, name)(pair.stored, state_dtype="8bit", **OPTIMIZERS[name])
    fused = {} if name == "NAdam" else {"fused": True}
    reference = getattr(torch.optim, name)(pair.masters, **OPTIMIZERS[name], **fused)
    pair.train_rounding(optimizer, reference, rounded, steps=4)
    for stored, master in zip(pair.stored, pair.masters, strict=True):
        for state, value in reference.state[master].items():
            if companion_of(state) in optimizer.state[stored]:
                assert torch.equal(values_of(state, optimizer.state[stored]), value), state


def test_bytes_of_a_step(twins) -> None:
    count = 1 << 18
    pair = twins(dtype=torch.bfloat16, shapes=((count,),), chunk="1MiB")
    optimizer = optim.AdamW(pair.stored, state_dtype="8bit", overlap=False)
    # The master and two codes are read and written, the parameter is written; scales are in host memory.
    assert pair.moved_by_a_step(optimizer) == (6 * count, 8 * count)
    assert all(optimizer.state[pair.stored[0]][companion_of(name)].stored.tier == "host" for name in STATES)


@pytest.mark.parametrize("kind", [None, torch.bfloat16, "8bit", "plain"])
def test_states_of_any_kind_are_loaded(twins, kind: object) -> None:
    pair = twins()
    parameters = pair.masters if kind == "plain" else pair.stored
    optimizer = torch.optim.AdamW(parameters) if kind == "plain" else optim.AdamW(parameters, state_dtype=kind)
    pair.give_gradients()
    optimizer.step()
    other = optim.AdamW(pair.stored, state_dtype="8bit")
    other.load_state_dict(optimizer.state_dict())
    for stored, parameter in zip(pair.stored, parameters, strict=True):
        for name in STATES:
            theirs = optimizer.state[parameter]
            expected = values_of(name, theirs) if kind == "8bit" else rounded(name, full(theirs[name]).float())
            assert torch.equal(values_of(name, other.state[stored]), expected), name
    pair.give_gradients()
    other.step()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value of a tensor, stored or not."""
    return tensor.full_tensor() if isinstance(tensor, zinf_fx.StoredTensor) else tensor


@pytest.mark.parametrize("default", [nullcontext, *DEFAULTS.values()], ids=["fp32", *DEFAULTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_loaded_into_states_of_fp32(twins, dtype: torch.dtype, default: Callable) -> None:
    """Split masters are loaded into whole ones, too."""
    pair = twins(dtype=dtype)
    master_dtype = "split" if dtype == torch.bfloat16 else None
    optimizer = optim.AdamW(pair.stored, state_dtype="8bit", master_dtype=master_dtype)
    pair.give_gradients()
    optimizer.step()
    with default():
        other = optim.AdamW(pair.stored)
        other.load_state_dict(optimizer.state_dict())
    for stored in pair.stored:
        masters = {"master"} if dtype == torch.bfloat16 else set()
        assert set(other.state[stored]) == {"step", *STATES, *masters}
        assert all(torch.equal(other.state[stored][name].full_tensor().bfloat16(), stored) for name in masters)
        for name in STATES:
            assert torch.equal(other.state[stored][name].full_tensor(), values_of(name, optimizer.state[stored]))


def test_float64_and_whole_parameters_are_refused(twins) -> None:
    with pytest.raises(OptimizerError, match=r"torch.float64: states in torch.float64 can't be"):
        optim.AdamW(twins(dtype=torch.float64).stored, state_dtype="8bit")
    with pytest.raises(OptimizerError, match="leave state_dtype out"):
        optim.Adafactor(twins(shapes=((130, 258),)).stored, state_dtype="8bit")
