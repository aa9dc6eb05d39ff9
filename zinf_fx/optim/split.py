"""Split masters: of the fp32 master of a bf16 weight, what the weight doesn't have.

A weight is its master rounded to nearest and to even. So the upper half of the master's bits are those of the weight,
or one less where rounding went up in magnitude: the lower half, 16 bits, and one bit that says which, make the master
again, every bit of it. (The lower half alone leaves ties open.) Bits are integers here, so that infinite and subnormal
values, and finite ones that are rounded to infinity, are nothing special. A NaN stays a NaN.

[Note: weights that others write to]
A weight that somebody writes to between two steps makes another master than before: what is kept is added to the
weight, as it were, so that the master still is one that is rounded to what was written. Where there is no such master
(of zero, nothing lies below), it is the weight. Without the option, the master of such a weight is the weight itself.
A weight that gets its value back, as after an evaluation of averaged weights, has its master again.
"""

from __future__ import annotations

from functools import cache

import torch

from zinf_fx.adam import SPLIT
from zinf_fx.errors import OptimizerError
from zinf_fx.native import kernels
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import BITS


def check_can_be_split(parameter: StoredTensor) -> None:
    """Raises: OptimizerError for a parameter whose master can't be split."""
    what = f"master_dtype={SPLIT!r} for a parameter of shape {tuple(parameter.shape)} and {parameter.dtype}"
    if parameter.dtype == torch.float16:
        raise OptimizerError(f"{what}: the bits of bfloat16 are those of fp32, and others' are not; leave it out")
    if parameter.whole is not parameter:
        raise OptimizerError(
            f"{what}, which is a DTensor of tensor parallelism: bits of its elements are in no order that another "
            "division has; leave it out"
        )


def split(masters: torch.Tensor, weights: torch.Tensor, lower: torch.Tensor, up: torch.Tensor) -> None:
    """Write what weights, bf16 [n], don't have of their masters, fp32 [n]: `lower`, int16 [n], and `up`, uint8
    [n / 8], eight bits in each, the first the lowest."""
    count, threads = masters.numel(), torch.get_num_threads()
    if masters.device.type == "cpu":
        kernels.split_masters(masters.data_ptr(), weights.data_ptr(), count, lower.data_ptr(), up.data_ptr(), threads)
    else:
        _split_anywhere(masters, weights, lower, up)


def _split_anywhere(masters: torch.Tensor, weights: torch.Tensor, lower: torch.Tensor, up: torch.Tensor) -> None:
    """The same, by operations of PyTorch."""
    bits = masters.view(torch.int32)
    lower.copy_(bits & 0xFFFF)  # which keeps the lower 16 bits
    raised = ((bits >> 16) & 0xFFFF) != (weights.view(torch.int16).to(torch.int32) & 0xFFFF)
    padded = torch.nn.functional.pad(raised.to(torch.uint8), (0, -masters.numel() % BITS))
    up.copy_((padded.view(-1, BITS) << _places(masters.device)).sum(-1, dtype=torch.uint8))


def join(weights: torch.Tensor, lower: torch.Tensor, up: torch.Tensor, masters: torch.Tensor) -> torch.Tensor:
    """Write the masters, which are returned: see `split`."""
    count, threads = weights.numel(), torch.get_num_threads()
    if weights.device.type == "cpu":
        kernels.join_masters(weights.data_ptr(), lower.data_ptr(), up.data_ptr(), count, masters.data_ptr(), threads)
        return masters
    return _join_anywhere(weights, lower, up, masters)


def _join_anywhere(weights: torch.Tensor, lower: torch.Tensor, up: torch.Tensor, masters: torch.Tensor) -> torch.Tensor:
    upper = weights.view(torch.int16).to(torch.int32) & 0xFFFF
    raised = (up[:, None] >> _places(weights.device) & 1).flatten()[: weights.numel()].to(torch.int32)
    bits = (upper - raised) << 16 | (lower.to(torch.int32) & 0xFFFF)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16 & 0xFFFF
    is_of_weight = (rounded == upper) & ((bits & 0x7FFFFFFF) <= 0x7F800000)
    return masters.copy_(torch.where(is_of_weight, bits, upper << 16).view(torch.float32))


@cache
@torch.inference_mode(False)
def _places(device: torch.device) -> torch.Tensor:
    """Of the bits in a byte: uint8 [8]."""
    return torch.arange(BITS, dtype=torch.uint8, device=device)
