"""Formats of few bits per weight: how values become bytes, and bytes values again.

A quantised tensor [rows, ..., columns] is a matrix of bytes [rows, row_nbytes]: of each run of `columns` values first
the codes, padded to whole scales, then one scale per block. So any rows of the tensor lie in consecutive bytes together
with their scales, and can be moved and dequantised by themselves.

| format | bits | block | scale | code | source |
|---|---|---|---|---|---|
| int8 | 8 | columns | fp32 | signed integer, the largest magnitude at 127 | LLM.int8 (2022), section 2.1, by rows |
| fp8 | 8 | columns | fp32 | float8_e4m3fn, the largest magnitude at 448 | OCP 8-bit floating point (2023), E4M3 |
| fp8_block | 8 | 128 | fp32 | as fp8 | DeepSeek-V3 (2024), section 3.3, where 128 rows share a scale, too |
| nf4 | 4 | 64 | fp32 | place in the table of NormalFloat | QLoRA (2023), section 3 and appendix E |
| mxfp4 | 4 | 32 | E8M0 | E2M1 | OCP Microscaling Formats (2023), sections 5.3.3, 5.4.1 and 6.3 |

Of two codes in a byte, the first is in the high half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from zinf_fx import ops
from zinf_fx.native import kernels
from zinf_fx.sizes import round_up

# QLoRA, appendix E: the quantiles of a normal distribution, with an exact zero, scaled to [-1, 1].
_NORMAL_FLOAT = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# The values of E2M1's codes: a bit of sign, two of exponent, one of mantissa.
_E2M1 = tuple(sign * magnitude for sign in (1.0, -1.0) for magnitude in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_E8M0 = torch.float8_e8m0fnu
# The exponent of E8M0's codes is less than the code by so much.
_BIAS = 127
# Values that are worked on at a time on the CPU: what one operation leaves to the next stays in the cache.
_AT_A_TIME = 1 << 18
# Values of a row that are worth scales of their own: a block of nf4.
_FEWEST = 64

_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@dataclass(frozen=True)
class Format:
    """How a run of values lies in bytes.

    Attributes:
        name: in `Config.frozen_dtype`.
        dtype: of one code; None: two codes share a byte.
        largest: the code of a block's largest magnitude.
        block: values that share a scale; None: all of a row.
        scale: the dtype of one.
        table: the values of codes without a dtype.
    """

    name: str
    dtype: torch.dtype | None
    largest: float
    block: int | None = None
    scale: torch.dtype = torch.float32
    table: tuple[float, ...] | None = None

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.dtype is None else 8

    def blocks(self, columns: int) -> int:
        """Scales of a row of so many values."""
        return 1 if self.block is None else -(-columns // self.block)

    def codes_nbytes(self, columns: int) -> int:
        """Bytes of the codes of a row, padded to whole scales, and where two share a byte to whole blocks."""
        nbytes = columns if self.dtype is not None or self.block is None else self.blocks(columns) * self.block // 2
        return round_up(nbytes, self.scale.itemsize)

    def row_nbytes(self, columns: int) -> int:
        """Bytes of a row: its codes and its scales."""
        return self.codes_nbytes(columns) + self.blocks(columns) * self.scale.itemsize


_KINDS = (
    Format("int8", torch.int8, 127.0),
    Format("fp8", torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max),
    Format("fp8_block", torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max, 128),
    Format("nf4", None, 1.0, 64, table=_NORMAL_FLOAT),
    Format("mxfp4", None, 6.0, 32, scale=_E8M0, table=_E2M1),
)
FORMATS: dict[str, Format] = {kind.name: kind for kind in _KINDS}


def can_be_quantised(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a matrix of floating-point values, or several (those of experts), whose rows are long enough
    to be smaller in every format. Vectors and the kernels of convolutions have too few values per scale."""
    is_matrix = tensor.dim() in (2, 3) and tensor.numel() > 0 and tensor.shape[-1] >= _FEWEST
    return is_matrix and tensor.is_floating_point() and tensor.itemsize > 1


def is_table(module: torch.nn.Module) -> bool:
    """Whether the weight of a module is looked up by rows. Such stays as it is, as quantising libraries leave it: a
    lookup takes few rows, and would dequantise all."""
    return isinstance(module, _TABLES)


def tables_of(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The ids of parameters that these modules look up by rows."""
    return {id(module.weight) for module in modules if is_table(module)}


def quantised_shape(shape: Sequence[int], name: str) -> tuple[int, int]:
    """The matrix of bytes for a tensor [rows, ..., columns]."""
    rows, *middle, columns = shape
    return rows, math.prod(middle) * FORMATS[name].row_nbytes(columns)


@torch.no_grad()
def quantised(value: torch.Tensor, name: str) -> torch.Tensor:
    """The bytes of a tensor [rows, ..., columns] in a format: [rows, nbytes], uint8, on its device.

    Raises: ValueError for values that are not finite, which no format has.
    """
    kind, columns = FORMATS[name], value.shape[-1]
    runs = value.reshape(-1, columns)
    packed = torch.zeros(len(runs), kind.row_nbytes(columns), dtype=torch.uint8, device=value.device)
    for part in _runs_at_a_time(len(runs), columns, value.device):
        _quantise(runs[part].to(torch.float32), packed[part], kind)
    return packed.view(quantised_shape(value.shape, name))


@torch.no_grad()
def quantised_over(packed: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
    """The bytes of a tensor [rows, ..., columns], as `quantised`, but where they are there already: blocks of which no
    value differs from what `packed` [rows, nbytes] says keep their bytes, since quantising values that were rounded
    once may give others.
    """
    kind, columns = FORMATS[name], value.shape[-1]
    codes_nbytes, block_nbytes = kind.codes_nbytes(columns), (kind.block or columns) * kind.bits // 8
    runs, values = packed.clone().view(-1, kind.row_nbytes(columns)), value.reshape(-1, columns)
    for part in _runs_at_a_time(len(runs), columns, value.device):
        before = dequantised(runs[part], (columns,), name, value.dtype)
        differs = _in_blocks(before != values[part], kind).any(-1)
        (changed,) = differs.any(-1).nonzero(as_tuple=True)
        of_codes = torch.nn.functional.pad(
            differs[changed].repeat_interleave(block_nbytes, 1)[:, :codes_nbytes],
            (0, max(codes_nbytes - differs.shape[1] * block_nbytes, 0)),
        )
        of_scales = differs[changed].repeat_interleave(kind.scale.itemsize, 1)
        bytes_now = quantised(values[part][changed], name)
        runs[part][changed] = torch.where(torch.cat([of_codes, of_scales], 1), bytes_now, runs[part][changed])
    return runs.view(packed.shape)


def _in_blocks(runs: torch.Tensor, kind: Format) -> torch.Tensor:
    """Runs [n, columns], padded to whole blocks, as [n, blocks, values]."""
    blocks = kind.blocks(runs.shape[1])
    if kind.block is not None:
        runs = torch.nn.functional.pad(runs, (0, blocks * kind.block - runs.shape[1]))
    return runs.view(len(runs), blocks, -1)


def _quantise(runs: torch.Tensor, packed: torch.Tensor, kind: Format) -> None:
    """Write the bytes of runs [n, columns] in fp32 to [n, row_nbytes]."""
    columns = runs.shape[1]
    runs = _in_blocks(runs, kind)
    magnitude = runs.abs().amax(-1)
    if not torch.isfinite(magnitude).all():
        raise ValueError(f"infinite values and NaN can't be stored as {kind.name}")
    codes_nbytes = kind.codes_nbytes(columns)
    if kind.scale is _E8M0:
        # The largest power of two that the codes have comes to where the block's largest magnitude has its own.
        exponents = (torch.frexp(magnitude).exponent - math.frexp(kind.largest)[1]).clamp(min=-_BIAS)
        packed[:, codes_nbytes:] = exponents + _BIAS
        scaled = torch.ldexp(runs, -exponents.unsqueeze(-1)).flatten(1)
    else:
        scales = magnitude / kind.largest
        packed[:, codes_nbytes:].view(kind.scale).copy_(scales)
        scaled = (runs / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)).flatten(1)
    if kind.dtype is None:
        packed[:, :codes_nbytes] = _NEAREST[kind.name](scaled)
        return
    scaled = scaled[:, :columns].round() if kind.dtype is torch.int8 else scaled[:, :columns]
    packed[:, :columns].view(kind.dtype).copy_(scaled.clamp(-kind.largest, kind.largest))


def _nearest_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """The codes of E2M1 that are nearest to values, or even, and the largest for larger ones: fp32 [n, columns] ->
    uint8 [n, columns / 2]."""
    magnitude = scaled.abs()
    exponent = (magnitude >= 2).int() + (magnitude >= 4)  # of 2 above 1; below 2, steps are of 1/2
    steps = torch.ldexp(magnitude, 1 - exponent).round().int() + 2 * exponent
    high, low = (steps.clamp(max=7) + 8 * scaled.signbit()).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return high << 4 | low


def _nearest_of_16(scaled: torch.Tensor) -> torch.Tensor:
    """The codes of NormalFloat that are nearest to values in [-1, 1]: fp32 [n, columns] -> uint8 [n, columns / 2]."""
    bounds = _midpoints(scaled.device)
    if scaled.device.type != "cpu":
        high, low = torch.bucketize(scaled, bounds).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
        return high << 4 | low
    scaled, codes = scaled.contiguous(), scaled.new_empty((len(scaled), scaled.shape[1] // 2), dtype=torch.uint8)
    kernels.nearest_of_16(
        scaled.data_ptr(), codes.numel(), bounds.data_ptr(), codes.data_ptr(), torch.get_num_threads()
    )
    return codes


_NEAREST = {"nf4": _nearest_of_16, "mxfp4": _nearest_e2m1}


def dequantised(
    packed: torch.Tensor, shape: Sequence[int], name: str, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values of a quantised tensor: packed [rows, nbytes], uint8 -> [rows, *shape], of `dtype`; in `out`, if given.

    Each is its code's value times the scale in fp32, rounded once.
    """
    kind, columns = FORMATS[name], shape[-1]
    if out is None:
        out = torch.empty(packed.shape[0], *shape, dtype=dtype, device=packed.device)
    runs, values = packed.reshape(-1, kind.row_nbytes(columns)), out.view(-1, columns)
    if can_dequantise_parts(packed, dtype):
        dequantise_part(runs, columns, range(columns), name, values)
        return out
    for part in _runs_at_a_time(len(runs), columns, packed.device):
        _dequantise(runs[part], values[part], kind)
    return out


torch.library.impl(ops.dequantize.name(), "CompositeExplicitAutograd", dequantised)

_NATIVE = {torch.float32: kernels.FP32, torch.bfloat16: kernels.BF16}
_CODES = {torch.int8: kernels.INTEGERS, torch.float8_e4m3fn: kernels.E4M3, None: kernels.PAIRS}
_SCALES = {torch.float32: kernels.SCALES_FP32, _E8M0: kernels.SCALES_E8M0}


def can_dequantise_parts(packed: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `dequantise_part` makes values of this dtype where the bytes are."""
    return packed.device.type == "cpu" and dtype in _NATIVE


def dequantise_part(runs: torch.Tensor, length: int, columns: range, name: str, out: torch.Tensor) -> None:
    """As `dequantised`, for some columns of runs of `length` values: runs [n, row_nbytes] -> out [n, len(columns)],
    contiguous. Columns begin where a block does."""
    kind, start = FORMATS[name], columns.start
    block, skipped = kind.block or length, start * kind.bits // 8
    scales = kind.codes_nbytes(length) + start // block * kind.scale.itemsize
    kernels.dequantize(
        _CODES[kind.dtype],
        runs.data_ptr() + skipped,
        runs.shape[1],
        _SCALES[kind.scale],
        runs.data_ptr() + scales,
        runs.shape[1],
        len(runs),
        len(columns),
        block,
        0 if kind.table is None else _table(name, torch.device("cpu")).data_ptr(),
        _NATIVE[out.dtype],
        out.data_ptr(),
        torch.get_num_threads(),
    )


def _dequantise(runs: torch.Tensor, values: torch.Tensor, kind: Format) -> None:
    """Write the values of runs [n, row_nbytes] to [n, columns]."""
    columns, codes_nbytes = values.shape[1], kind.codes_nbytes(values.shape[1])
    scales = runs[:, codes_nbytes:].view(kind.scale).to(torch.float32)
    if kind.dtype is not None:
        if kind.block is not None:
            scales = scales.repeat_interleave(kind.block, 1)[:, :columns]
        values.copy_(runs[:, :columns].view(kind.dtype).to(torch.float32).mul_(scales))
        return
    assert kind.block is not None
    pairs = torch.nn.functional.embedding(runs[:, :codes_nbytes].to(torch.int32), _pairs(kind.name, runs.device))
    scaled = pairs.view(len(runs), -1, kind.block).mul_(scales.unsqueeze(-1)).view(len(runs), -1)
    values.copy_(scaled[:, :columns])


def _runs_at_a_time(count: int, columns: int, device: torch.device) -> list[slice]:
    """How many runs are worked on together: on a GPU all, whose kernels are slow to start."""
    at_a_time = count if device.type != "cpu" else max(_AT_A_TIME // columns, 1)
    return [slice(start, start + at_a_time) for start in range(0, count, max(at_a_time, 1))]


@cache
@torch.inference_mode(False)
def _table(name: str, device: torch.device) -> torch.Tensor:
    """The values of the codes of a format: fp32 [16]."""
    return torch.tensor(FORMATS[name].table, device=device, dtype=torch.float32)


@cache
@torch.inference_mode(False)
def _midpoints(device: torch.device) -> torch.Tensor:
    """Between the neighbours of the table of NormalFloat: [15]."""
    table = _table("nf4", device)
    return (table[1:] + table[:-1]) / 2


@cache
@torch.inference_mode(False)
def _pairs(name: str, device: torch.device) -> torch.Tensor:
    """The two values of codes of a format that a byte has: fp32 [256, 2]."""
    table = _table(name, device)
    numbers = torch.arange(256, device=device)
    return torch.stack([table[numbers >> 4], table[numbers & 15]], -1)
