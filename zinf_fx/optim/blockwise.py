"""States of 8 bits per element: codes, and a scale for each block of elements.

The largest magnitude of a block is its scale, and each element, divided by it, becomes the nearest of the 256 numbers
of dynamic quantisation, whose steps are about in proportion to what they stand for, over seven decades (8-bit
Optimizers via Block-wise Quantization, Dettmers et al. 2021, sections 1.3 and 2, and appendix F). One map is signed;
the other, for states that are never negative, has twice as many steps. Blocks have 256 elements, as those of torchao
and bitsandbytes.

The scales of a state are its companion: see [Note: companions].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import chain

import torch

from zinf_fx.errors import OptimizerError
from zinf_fx.native import kernels
from zinf_fx.optim.companions import CODES, companion_of
from zinf_fx.optim.forms import EIGHT_BITS
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import BLOCK, PAGE

# Never negative, of the classes of torch.optim.
_UNSIGNED = {"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta"}


def computed(name: str, memory: Mapping[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Write a state that `memory` has in another form than its values to these; they are returned."""
    if memory[name].dtype == CODES:
        return decode(name, memory[name], memory[companion_of(name)], values)
    return values.copy_(memory[name])


def store_computed(name: str, memory: Mapping[str, torch.Tensor], values: torch.Tensor) -> None:
    """The other way."""
    if memory[name].dtype == CODES:
        encode(name, values, memory[name], memory[companion_of(name)])
    else:
        memory[name].copy_(values)


def check_can_be_coded(parameter: StoredTensor, dtype: torch.dtype) -> None:
    """Raises: OptimizerError for a parameter whose states, in `dtype`, can't be codes of 8 bits."""
    what = f"state_dtype={EIGHT_BITS!r} for a parameter of shape {tuple(parameter.shape)}"
    if dtype != torch.float32:
        raise OptimizerError(f"{what} and {parameter.dtype}: states in {dtype} can't be; leave it out")
    if parameter.whole is not parameter:
        raise OptimizerError(
            f"{what}, which is a DTensor of tensor parallelism: blocks of its elements are in no order that another "
            "division has; use state_dtype=torch.bfloat16"
        )
    storage = parameter.storage
    shards, on_nvme = storage.share.shards, storage.placement.optimizer == "nvme"
    if on_nvme and shards.ranks > 1 and len(shards.segments) > 1 and shards.step % PAGE:
        raise OptimizerError(
            f"{what}, which is divided over ranks tile by tile: parts of its codes are no whole pages of the store; "
            "use tile=None or state_dtype=torch.bfloat16"
        )


def decode(name: str, found: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write the values, fp32 [n], of the codes [n] of a state and its scales [blocks]; they are returned."""
    table = _table(_is_signed(name), values.device)
    if values.device.type != "cpu":
        whole = table[found.to(torch.int32)]
        _by_blocks(torch.mul, whole, scales, values)
        return values
    count, threads = values.numel(), torch.get_num_threads()
    even = count // BLOCK * BLOCK
    for first, rows, columns in ((0, even // BLOCK, BLOCK), (even, int(even < count), count - even)):
        kernels.dequantize(
            kernels.PLACES,
            found.data_ptr() + first,
            BLOCK,
            kernels.SCALES_FP32,
            scales.data_ptr() + first // BLOCK * scales.itemsize,
            scales.itemsize,
            rows,
            columns,
            BLOCK,
            table.data_ptr(),
            kernels.FP32,
            values.data_ptr() + first * values.itemsize,
            threads,
        )
    return values


def encode(name: str, values: torch.Tensor, found: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the codes [n] of the values, fp32 [n], of a state, and the scales [blocks]."""
    values, bounds = values.contiguous(), _bounds(_is_signed(name), values.device)
    if values.device.type == "cpu":
        first = _first(_is_signed(name))
        kernels.nearest_of_256(
            values.data_ptr(),
            values.numel(),
            BLOCK,
            bounds.data_ptr(),
            first.data_ptr(),
            found.data_ptr(),
            scales.data_ptr(),
            torch.get_num_threads(),
        )
        return
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
    largest = padded.view(-1, BLOCK).abs().amax(-1)
    scales.copy_(torch.where(largest.isfinite(), largest, torch.nan))
    divided = torch.empty_like(values)
    _by_blocks(torch.div, values, torch.where(scales > 0, scales, 1.0), divided)
    found.copy_(torch.bucketize(divided, bounds[:-1]))


def _by_blocks(operation: object, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """`operation` on each value [n] and the scale [blocks] of its block, in `out` [n]."""
    even = values.numel() // BLOCK * BLOCK
    operation(values[:even].view(-1, BLOCK), scales[: even // BLOCK, None], out=out[:even].view(-1, BLOCK))
    operation(values[even:], scales[even // BLOCK :], out=out[even:])


def _is_signed(name: str) -> bool:
    return name not in _UNSIGNED


def _numbers(signed: bool) -> list[float]:
    """The 256 numbers of dynamic quantisation, ascending: of each decade the middles of equal steps, half of the number
    of steps of the decade above it; zero, and one."""
    decades = 7
    found = [0.0, 1.0]
    for decade in range(decades):
        steps = 2 ** (decade if signed else decade + 1)
        middles = (0.1 + 0.9 * (step + 0.5) / steps for step in range(steps))
        found += [10.0 ** (decade - decades + 1) * middle for middle in middles]
    return sorted(chain(found, (-number for number in found[2:])) if signed else found)


@cache
@torch.inference_mode(False)
def _table(signed: bool, device: torch.device) -> torch.Tensor:
    """The number of each code: fp32 [256]."""
    return torch.tensor(_numbers(signed), dtype=torch.float32, device=device)


@cache
@torch.inference_mode(False)
def _bounds(signed: bool, device: torch.device) -> torch.Tensor:
    """Between the neighbours of the table, and an infinite one: fp32 [256]."""
    table = _table(signed, torch.device("cpu"))
    bounds = torch.cat([(table[1:] + table[:-1]) / 2, table.new_tensor([torch.inf])])
    return bounds.to(device)


@cache
@torch.inference_mode(False)
def _first(signed: bool) -> torch.Tensor:
    """For the upper 16 bits of any fp32 value, how many bounds lie below all values with these: uint8 [65536]."""
    upper = torch.arange(1 << 16, dtype=torch.int64, device="cpu") << 16
    least = torch.where(upper < 1 << 31, upper, upper + 0xFFFF - (1 << 32)).to(torch.int32).view(torch.float32)
    return torch.bucketize(least, _bounds(signed, torch.device("cpu"))[:-1]).to(torch.uint8)
