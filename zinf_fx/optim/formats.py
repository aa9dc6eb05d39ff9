"""What the store keeps of states in another form than the update computes with: fewer bits, codes of 8, split masters.

[Note: companions]
A state that is kept in less than the dtype of its update may have a companion: codes of 8 bits have a scale for each
BLOCK of elements (see `blockwise`), and the lower halves of masters a bit for each element (see `split`). A companion
is a tensor of its own, one element of which belongs to so many consecutive elements of the state. They are counted from
the first element of the whole parameter. Chunks and windows begin at multiples of WINDOW_ALIGNMENT elements behind a
part that a rank updates, and such a part begins at a multiple of at least BLOCK elements (see `plan.sharding`). So no
element of a companion belongs to two of them, and states and companions are the same for any chunks and ranks.

[Note: codes of 8 bits]
The largest magnitude of a block is its scale, and each element, divided by it, becomes the nearest of the 256 numbers
of dynamic quantisation, whose steps are about in proportion to what they stand for, over seven decades (8-bit
Optimizers via Block-wise Quantization, Dettmers et al. 2021, sections 1.3 and 2, and appendix F). One map is signed;
the other, for states that are never negative, has twice as many steps. Blocks have 256 elements, as those of torchao
and bitsandbytes.

[Note: split masters]
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

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Literal

import torch

from zinf_fx.adam import SPLIT, StateForm
from zinf_fx.arguments import did_you_mean
from zinf_fx.errors import OptimizerError
from zinf_fx.interrupts import let_through
from zinf_fx.native import kernels
from zinf_fx.optim.elements import current_chunks, divided_as, open_elements, overwritten
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import BITS, BLOCK, PAGE

EIGHT_BITS: Literal["8bit"] = "8bit"
"""The name of states of 8 bits among the values of `state_dtype`."""

StateDtype = torch.dtype | Literal["8bit"]
"""Of element-wise states in the store: a dtype, or codes of 8 bits with scales of blocks."""

FORMS: Mapping[StateDtype, StateForm] = {torch.float32: "float32", torch.bfloat16: "bfloat16", EIGHT_BITS: EIGHT_BITS}
"""The names of those that are accepted."""

MasterDtype = torch.dtype | Literal["split"]
"""Of the masters of bf16 parameters in the store: torch.float32, or what the weights don't have of that."""


@dataclass(frozen=True)
class KeptAs:
    """What an optimizer keeps in another form in the store than it computes with.

    Attributes:
        state_dtype: the dtype of element-wise states; None: the class's own.
        master_dtype: the dtype of masters; None: fp32.
    """

    state_dtype: StateDtype | None = None
    master_dtype: MasterDtype | None = None

    @classmethod
    def of(cls, state_dtype: StateDtype | None, master_dtype: MasterDtype | None) -> KeptAs:
        """Read the options of an optimizer. Raises: OptimizerError for what isn't accepted."""
        accepted = {
            "state_dtype": (state_dtype, (None, torch.float32, torch.bfloat16, EIGHT_BITS)),
            "master_dtype": (master_dtype, (None, torch.float32, SPLIT)),
        }
        for option, (given, values) in accepted.items():
            if given not in values:
                meant = did_you_mean(given, [value for value in values if isinstance(value, str)])
                raise OptimizerError(f"{option}={given!r} is not accepted: {', '.join(map(repr, values))} are{meant}")
        return cls(state_dtype, master_dtype)

    @property
    def splits(self) -> bool:
        """Whether masters are split."""
        return self.master_dtype == SPLIT

    @property
    def narrowed(self) -> list[str]:
        """The options that ask for another form than the class's own."""
        return [name for name, value in vars(self).items() if value is not None and value != torch.float32]


MASTER = "master"
"""Name of the fp32 copy of a low-precision parameter among its states."""

MASTER_UP = "master_up"
"""Name of the companion of a split one."""

CODES = torch.uint8
"""Of states of 8 bits."""

LOWER = torch.int16
"""Of the lower halves of split masters."""

_SCALE = "_scale"


@dataclass(frozen=True)
class Companion:
    """A kind of companions: `dtype`, and how many `elements` of the state belong to one of it."""

    dtype: torch.dtype
    elements: int

    def of(self, elements: range) -> range:
        """Return the elements of the companion that belong to consecutive elements of a state."""
        assert elements.start % self.elements == 0 or not elements, elements
        return range(-(-elements.start // self.elements), -(-elements.stop // self.elements))

    def shape(self, shape: Sequence[int]) -> torch.Size:
        """Return the shape of the companion for a parameter of `shape`."""
        return torch.Size([-(-math.prod(shape) // self.elements)])


SCALES = Companion(torch.float32, BLOCK)

UPS = Companion(torch.uint8, BITS)


def companion_of(name: str) -> str:
    """Return the name that the companion of state `name` has, if there is one."""
    return MASTER_UP if name == MASTER else name + _SCALE


def kind_of(name: str, names: Collection[str]) -> Companion | None:
    """Return which kind of companion of another state in `names` the state `name` is, if it is one."""
    if name == MASTER_UP:
        return UPS if MASTER in names else None
    return SCALES if name.endswith(_SCALE) and name.removesuffix(_SCALE) in names else None


def part_of(name: str, names: Collection[str], elements: range) -> range:
    """Return the elements of the state `name`, one of `names`, that belong to some elements of the parameter."""
    kind = kind_of(name, names)
    return elements if kind is None else kind.of(elements)


def has_companion(value: object) -> bool:
    """Whether the value of a state says nothing without its companion."""
    return isinstance(value, torch.Tensor) and value.dtype in (CODES, LOWER)


# Never negative, of the classes of torch.optim.
_UNSIGNED = {"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta"}


def computed(name: str, memory: Mapping[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Write the values of a state, which `memory` has in another form, to `values`, and return these."""
    if memory[name].dtype == CODES:
        return decode(name, memory[name], memory[companion_of(name)], values)
    return values.copy_(memory[name])


def store_computed(name: str, memory: Mapping[str, torch.Tensor], values: torch.Tensor) -> None:
    """Write the values of a state to `memory`, which has it in another form."""
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
    storage = parameter.stored
    shards, on_nvme = storage.shard.shards, storage.placement.optimizer == "nvme"
    if on_nvme and shards.ranks > 1 and len(shards.segments) > 1 and shards.step % PAGE:
        raise OptimizerError(
            f"{what}, which is divided over ranks tile by tile: parts of its codes are no whole pages of the store; "
            "use tile=None or state_dtype=torch.bfloat16"
        )


def decode(name: str, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write the values, fp32 [n], of the codes [n] of a state and its scales [blocks], and return them."""
    table = _table(_is_signed(name), values.device)
    if values.device.type != "cpu":
        whole = table[codes.to(torch.int32)]
        _by_blocks(torch.mul, whole, scales, values)
        return values
    count, threads = values.numel(), torch.get_num_threads()
    even = count // BLOCK * BLOCK
    for first, rows, columns in ((0, even // BLOCK, BLOCK), (even, int(even < count), count - even)):
        kernels.dequantize(
            kernels.PLACES,
            codes.data_ptr() + first,
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


def encode(name: str, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
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
            codes.data_ptr(),
            scales.data_ptr(),
            torch.get_num_threads(),
        )
        return
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
    largest = padded.view(-1, BLOCK).abs().amax(-1)
    scales.copy_(torch.where(largest.isfinite(), largest, torch.nan))
    divided = torch.empty_like(values)
    _by_blocks(torch.div, values, torch.where(scales > 0, scales, 1.0), divided)
    codes.copy_(torch.bucketize(divided, bounds[:-1]))


def _by_blocks(
    operation: Callable[..., torch.Tensor], values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Run `operation` on each value [n] and the scale [blocks] of its block, in `out` [n]."""
    even = values.numel() // BLOCK * BLOCK
    operation(values[:even].view(-1, BLOCK), scales[: even // BLOCK, None], out=out[:even].view(-1, BLOCK))
    operation(values[even:], scales[even // BLOCK :], out=out[even:])


def _is_signed(name: str) -> bool:
    return name not in _UNSIGNED


def _numbers(signed: bool) -> list[float]:
    """Return the 256 numbers of dynamic quantisation, ascending: of each decade the middles of equal steps, half of the
    number of steps of the decade above it; zero, and one."""
    decades = 7
    numbers = [0.0, 1.0]
    for decade in range(decades):
        steps = 2 ** (decade if signed else decade + 1)
        middles = (0.1 + 0.9 * (step + 0.5) / steps for step in range(steps))
        numbers += [10.0 ** (decade - decades + 1) * middle for middle in middles]
    return sorted(chain(numbers, (-number for number in numbers[2:])) if signed else numbers)


@cache
@torch.inference_mode(False)
def _table(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the number of each code: fp32 [256]."""
    return torch.tensor(_numbers(signed), dtype=torch.float32, device=device)


@cache
@torch.inference_mode(False)
def _bounds(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the bounds between neighbours of the table, and an infinite one: fp32 [256]."""
    table = _table(signed, torch.device("cpu"))
    bounds = torch.cat([(table[1:] + table[:-1]) / 2, table.new_tensor([torch.inf])])
    return bounds.to(device)


@cache
@torch.inference_mode(False)
def _first(signed: bool) -> torch.Tensor:
    """Return, for the upper 16 bits of any fp32 value, how many bounds lie below all values with these: uint8
    [65536]."""
    upper = torch.arange(1 << 16, dtype=torch.int64, device="cpu") << 16
    least = torch.where(upper < 1 << 31, upper, upper + 0xFFFF - (1 << 32)).to(torch.int32).view(torch.float32)
    return torch.bucketize(least, _bounds(signed, torch.device("cpu"))[:-1]).to(torch.uint8)


def numbers_of_codes(name: str) -> torch.Tensor:
    """Return what the codes of a state stand for: fp32 [256]."""
    return _table(_is_signed(name), torch.device("cpu"))


def places_of_codes(name: str) -> torch.Tensor:
    """Return, for the upper 16 bits of any fp32 value, which code the state has for it: uint32 [65536], see
    native/update.h."""
    return _places_of_codes(_is_signed(name))


@cache
@torch.inference_mode(False)
def _places_of_codes(signed: bool) -> torch.Tensor:
    """The least code of each, times 65536, and what the lower 16 bits carry into the next code when added: those of a
    bound among the values, inverted. The lower bits of negative values, which descend, are inverted themselves."""
    places = _first(signed).to(torch.int64) << 16
    bounds = _bounds(signed, torch.device("cpu"))[:-1].view(torch.int32).to(torch.int64)
    lower = torch.where(bounds < 0, bounds ^ 0xFFFF, bounds) & 0xFFFF
    places[bounds >> 16 & 0xFFFF] += 0xFFFF - lower
    return places.to(torch.uint32)


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
    """Split masters by operations of PyTorch."""
    bits = masters.view(torch.int32)
    lower.copy_(bits & 0xFFFF)  # which keeps the lower 16 bits
    raised = ((bits >> 16) & 0xFFFF) != (weights.view(torch.int16).to(torch.int32) & 0xFFFF)
    padded = torch.nn.functional.pad(raised.to(torch.uint8), (0, -masters.numel() % BITS))
    up.copy_((padded.view(-1, BITS) << _places(masters.device)).sum(-1, dtype=torch.uint8))


def join(weights: torch.Tensor, lower: torch.Tensor, up: torch.Tensor, masters: torch.Tensor) -> torch.Tensor:
    """Write the masters, and return them: see `split`."""
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
    """Return the places of the bits in a byte: uint8 [8]."""
    return torch.arange(BITS, dtype=torch.uint8, device=device)


def encode_into(name: str, target: StoredTensor, companion: StoredTensor, value: torch.Tensor) -> None:
    """Write the value of a state, stored or not, in fewer bytes, with its companion."""
    value = divided_as(target, value)
    for part in filter(len, current_chunks(target, torch.float32.itemsize)):
        let_through()
        with ExitStack() as windows:
            source = open_elements(value, CPU, part.start, len(part))
            windows.callback(source.close)
            beside = _beside(name, part)
            written = [windows.enter_context(overwritten(*place)) for place in ((target, part), (companion, beside))]
            values = source.wait().to(torch.float32)
            if name == MASTER:
                split(values, values.to(torch.bfloat16), *written)
            else:
                encode(name, values, *written)


def decode_into(
    name: str, target: StoredTensor, value: torch.Tensor, companion: torch.Tensor, parameter: StoredTensor
) -> None:
    """Write the values of a state of `parameter`, which `value` has in fewer bytes with its companion, stored or
    not."""
    kind = kind_of(companion_of(name), (name,))
    assert kind is not None
    value = divided_as(target, value)
    companion = divided_as(target, companion, target.stored.shard.shards.in_blocks(kind.elements))
    for part in filter(len, current_chunks(target, torch.float32.itemsize)):
        let_through()
        with ExitStack() as windows:
            beside = _beside(name, part)
            read = [(value, part), (companion, beside), *([(parameter, part)] if name == MASTER else [])]
            sources = [open_elements(tensor, CPU, elements.start, len(elements)) for tensor, elements in read]
            for source in sources:
                windows.callback(source.close)
            written = windows.enter_context(overwritten(target, part))
            stored, of_companion, *weights = [source.wait() for source in sources]
            values = torch.empty(len(part), dtype=torch.float32, device="cpu")
            if name == MASTER:
                written.copy_(join(weights[0], stored, of_companion, values))
            else:
                written.copy_(decode(name, stored, of_companion, values))


def _beside(name: str, part: range) -> range:
    """Return the elements of the companion of state `name` that belong to some elements."""
    return part_of(companion_of(name), (name,), part)
