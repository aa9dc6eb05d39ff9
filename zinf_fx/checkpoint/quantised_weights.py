"""Weights as quantised models are published: codes in one tensor of a safetensors file, their scales in another.

| codes | scales | what shares a scale | format |
|---|---|---|---|
| `W`, float8_e4m3fn [..., rows, columns] | `W_scale_inv` or `W_scale` | all of a matrix, or a row | fp8 |
| | | a block of 128 columns, in 128 rows or in one (DeepSeek-V3) | fp8_block |
| `W`, int8 [..., rows, columns] | `W_scale` (compressed-tensors, symmetric) | all of a matrix, or a row | int8 |
| `W_blocks`, uint8 [..., rows, blocks, 16] | `W_scales`, uint8 [..., rows, blocks] | 32 columns | mxfp4 |
| `W.blocks` | `W.scales` | 32 columns | mxfp4 |

`W_blocks` and `W_scales` are of a parameter [..., columns, rows] (gpt-oss in transformers), `W.blocks` and `W.scales`
of one [..., rows, columns] (gpt-oss as its authors read it). The first value in a byte is in the low half.

Experts that files have one by one, `experts.0.gate_proj.weight` and so on, may be one parameter of the model,
`experts.gate_up_proj` [experts, rows, columns]: the rows of its matrices are those of the files in order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch

from zinf_fx.checkpoint.safetensors_format import TensorInFile, WeightFiles
from zinf_fx.quantisation import FORMATS, dequantised

# In the order in which they are looked for, behind the name of the codes.
_SCALE_NAMES = ("_scale_inv", "_scale")
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_OF_CODES = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
# What is beside the codes of a linear layer that multiplies them with codes of its inputs, which are not made here.
_OF_INPUTS = ("input_scale", "activation_scale")
_BLOCK_ROWS = 128
_MXFP4 = {"_blocks": ("_scales", True), ".blocks": (".scales", False)}  # with whether the parameter is transposed
# Of which matrices of an expert each matrix of a parameter for all experts consists, from above.
_OF_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Published(ABC):
    """A weight in files, as codes and scales.

    Attributes:
        format: that which has the same codes and scales, row by row.
        rows_shape: of the values, as the codes lie: [..., rows, columns].
        transposed: whether the parameter has the last two dimensions the other way round.
    """

    format: str
    rows_shape: tuple[int, ...]
    transposed: bool
    is_complex = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter that has the values."""
        *matrices, rows, columns = self.rows_shape
        return (*matrices, columns, rows) if self.transposed else self.rows_shape

    def __str__(self) -> str:
        return f"{self.format}{list(self.shape)}"

    @property
    @abstractmethod
    def begin(self) -> tuple[Path, int]:
        """Orders weights as their codes lie in files."""

    @abstractmethod
    def rows(self, files: WeightFiles, numbers: range) -> torch.Tensor:
        """Return consecutive rows of all matrices in their format: uint8 [rows, row_nbytes].

        Raises: CheckpointError for a file that is shorter by now.
        """


@dataclass(frozen=True)
class Pair(Published):
    """One tensor of codes, and one of scales.

    Attributes:
        codes, scales: where they are.
        grid: of the scales: [matrices, rows, columns]; one matrix of them may be for all.
        rows_per_scale: rows of a matrix that share scales.
    """

    codes: TensorInFile
    scales: TensorInFile
    format: str
    rows_shape: tuple[int, ...]
    grid: tuple[int, int, int]
    rows_per_scale: int
    transposed: bool = False

    @property
    def begin(self) -> tuple[Path, int]:
        return self.codes.begin

    def rows(self, files: WeightFiles, numbers: range) -> torch.Tensor:
        kind, (height, columns) = FORMATS[self.format], self.rows_shape[-2:]
        per_row = columns * kind.bits // 8
        codes = files.read(self.codes, numbers.start * per_row, len(numbers) * per_row).view(-1, per_row)
        if kind.dtype is None:
            codes = codes << 4 | codes >> 4
        packed = torch.zeros(len(numbers), kind.row_nbytes(columns), dtype=torch.uint8, device="cpu")
        packed[:, :per_row] = codes
        matrices, scale_rows, scale_columns = self.grid
        rows = torch.arange(numbers.start, numbers.stop, device="cpu")
        own = (rows // height if matrices > 1 else 0) * scale_rows + rows % height // self.rows_per_scale
        first, last = int(own.min()), int(own.max())
        itemsize = self.scales.kind.dtype.itemsize
        nbytes = [count * scale_columns * itemsize for count in (first, last + 1 - first)]
        scales = files.read(self.scales, *nbytes).view(self.scales.kind.dtype).view(-1, scale_columns)
        scales = scales.to(kind.scale) if kind.scale is torch.float32 else scales.view(torch.uint8)
        packed[:, kind.codes_nbytes(columns) :] = scales[own - first].view(torch.uint8)
        return packed


@dataclass(frozen=True)
class Parts(Published):
    """Matrices one below the other that are one parameter.

    Attributes:
        parts: of one format, with as many columns.
    """

    parts: tuple[Pair, ...]
    rows_shape: tuple[int, ...]
    transposed = False

    @property
    def format(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  (read alone)
        return self.parts[0].format

    @property
    def begin(self) -> tuple[Path, int]:
        return min(part.begin for part in self.parts)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(part.rows_shape[0] for part in self.parts)]

    def rows(self, files: WeightFiles, numbers: range) -> torch.Tensor:
        rows, start = [], numbers.start
        while start < numbers.stop:
            number = bisect_right(self._starts, start) - 1
            begin, end = self._starts[number : number + 2]
            stop = min(end, numbers.stop)
            rows.append(self.parts[number].rows(files, range(start - begin, stop - begin)))
            start = stop
        return torch.cat(rows)


class PublishedElements:
    """The elements of a published weight: its bytes in its format, uint8, or values as the codes lie, rounded once to
    `dtype`."""

    def __init__(self, published: Published, files: WeightFiles, dtype: torch.dtype | None = None) -> None:
        """Without `dtype`, the elements are bytes."""
        self._published, self._files, self._is_bytes = published, files, dtype is None
        self.dtype = torch.uint8 if dtype is None else dtype

    def read(self, memory: torch.Tensor, first: int) -> None:
        """Fill contiguous `memory` with the elements from number `first` on."""
        published, columns = self._published, self._published.rows_shape[-1]
        per_row = FORMATS[published.format].row_nbytes(columns) if self._is_bytes else columns
        last = first + memory.numel()
        rows = published.rows(self._files, range(first // per_row, -(-last // per_row)))
        if not self._is_bytes:
            rows = dequantised(rows, (columns,), published.format, self.dtype)
        skipped = first % per_row
        memory.view(-1).copy_(rows.view(-1)[skipped : skipped + memory.numel()])


def as_published(
    places: Mapping[str, TensorInFile], wanted: Mapping[str, torch.Tensor]
) -> tuple[dict[str, TensorInFile | Published], list[str]]:
    """Return what is in files by the names of a model's tensors, with codes and scales joined, and what is wrong with
    them.

    `wanted`: the model's tensors. One that has codes or scales itself takes them from the files.
    """
    joined: dict[str, TensorInFile | Published] = dict(places)
    wrong: list[str] = []
    has_scales = any(name.endswith(_SCALE_NAMES) for name in places)
    for name, tensor in wanted.items():
        for part in _take_parts(name, tensor, joined, wrong) if name not in places and has_scales else ():
            _without_scales_of(part, joined)
    for name, place in places.items():
        how: Published | str | None = None
        ending = name[-len("_blocks") :]
        if name in wanted:
            if place.kind.dtype in _OF_CODES and wanted[name].is_floating_point() and wanted[name].itemsize > 1:
                if not has_scales:
                    continue  # values that were rounded, without scales
                how = _with_scales(name, places)
                _without_scales_of(name, joined)
        elif ending in _MXFP4 and name.removesuffix(ending) in wanted:
            whole, (scale_ending, transposed) = name.removesuffix(ending), _MXFP4[ending]
            how = _mxfp4(name, whole + scale_ending, places, transposed)
            joined.pop(name)
            joined.pop(whole + scale_ending, None)
            name = whole
        if isinstance(how, Published):
            joined[name] = how
        elif how is not None:
            wrong.append(how)
            joined.pop(name, None)
    return joined, wrong


def _without_scales_of(name: str, joined: dict[str, TensorInFile | Published]) -> None:
    """Leave out what is beside the codes of a weight."""
    stem = name.removesuffix("weight")
    for companion in (*(name + ending for ending in _SCALE_NAMES), *(stem + ending for ending in _OF_INPUTS)):
        joined.pop(companion, None)


def _take_parts(
    name: str, tensor: torch.Tensor, joined: dict[str, TensorInFile | Published], wrong: list[str]
) -> list[str]:
    """Replace what files have by experts by the parameter that has all of them. Returns the names of the codes."""
    stem, _, own = name.rpartition(".")
    if own not in _OF_EXPERTS or tensor.dim() != 3:
        return []
    names = [f"{stem}.{number}.{part}.weight" for number in range(tensor.shape[0]) for part in _OF_EXPERTS[own]]
    if not any(isinstance(place := joined.get(part), TensorInFile) and place.kind.dtype in _OF_CODES for part in names):
        return []
    if missing := [part for part in names if part not in joined]:
        wrong.append(f"'{name}' consists of {len(names)} weights, of which '{missing[0]}' is not there")
        return []
    pairs_or_faults = [_with_scales(part, joined) for part in names]
    if faults := [fault for fault in pairs_or_faults if isinstance(fault, str)]:
        wrong.append(faults[0])
        return []
    parts = [part for part in pairs_or_faults if isinstance(part, Pair)]
    first = parts[: len(_OF_EXPERTS[own])]
    rows, columns = sum(part.rows_shape[0] for part in first), first[0].rows_shape[-1]
    shapes = [(part.format, *part.rows_shape) for part in parts]
    if len({(part.format, part.rows_shape[1:]) for part in first}) > 1 or shapes != shapes[: len(first)] * len(tensor):
        wrong.append(f"'{name}' consists of weights of several formats or shapes, '{names[0]}' and others")
        return []
    for part in names:
        joined.pop(part)
    joined[name] = Parts(tuple(parts), (len(tensor), rows, columns))
    return names


def _with_scales(name: str, places: Mapping[str, TensorInFile | Published]) -> Pair | str:
    """Return a weight of 8-bit codes, or what is wrong with it."""
    codes = places[name]
    assert isinstance(codes, TensorInFile)
    if codes.kind.dtype not in _OF_CODES:
        return f"'{name}' is {codes.kind}, and others of its experts are codes"
    scale_name = next((name + ending for ending in _SCALE_NAMES if name + ending in places), None)
    if scale_name is None:
        names = " or ".join(f"'{name}{ending}'" for ending in _SCALE_NAMES)
        return f"'{name}' is {codes.kind}, and there is no {names} beside it"
    if f"{name}_zero_point" in places:
        return f"'{name}' has '{name}_zero_point' beside it, and only codes without zero points are read"
    scales = places[scale_name]
    assert isinstance(scales, TensorInFile)
    misfit = f"'{scale_name}' is {scales.kind}, which doesn't fit '{name}', {codes.kind}"
    if scales.kind.dtype not in _SCALE_DTYPES:
        return f"{misfit}: scales of {', '.join(str(dtype).removeprefix('torch.') for dtype in _SCALE_DTYPES)} are read"
    if len(codes.kind.shape) < 2:
        return f"{misfit}: only matrices are read"
    *matrices, rows, columns = codes.kind.shape
    grid = _grid(scales.kind.shape, tuple(matrices), rows)
    per_scale = None if grid is None else _rows_per_scale(grid[1], rows)
    by_codes = _OF_CODES[codes.kind.dtype]
    if grid is not None and per_scale is not None and grid[2] == 1:
        return Pair(codes, scales, by_codes, codes.kind.shape, grid, per_scale)
    blocked = FORMATS["fp8_block"]
    if grid is not None and per_scale is not None and grid[2] == blocked.blocks(columns) and by_codes == "fp8":
        return Pair(codes, scales, blocked.name, codes.kind.shape, grid, per_scale)
    blocks = f", a row or a block of {_BLOCK_ROWS} x {blocked.block}" if by_codes == "fp8" else " or a row"
    return f"{misfit}: scales of a matrix{blocks} are read"


def _grid(shape: tuple[int, ...], matrices: tuple[int, ...], rows: int) -> tuple[int, int, int] | None:
    """Return the scales [matrices, rows, columns] that have a shape, for so many matrices."""
    count = math.prod(matrices)
    if math.prod(shape) == 1:
        return (1, 1, 1)
    if shape == matrices:
        return (count, 1, 1)
    if shape == (*matrices, rows):
        return (count, rows, 1)
    return (count, shape[-2], shape[-1]) if shape[:-2] == matrices and len(shape) > 1 else None


def _rows_per_scale(scale_rows: int, rows: int) -> int | None:
    return next((per for per in (rows, 1, _BLOCK_ROWS) if scale_rows == -(-rows // per)), None)


def _mxfp4(name: str, scale_name: str, places: Mapping[str, TensorInFile], transposed: bool) -> Published | str:
    """Return a weight of 4-bit codes, or what is wrong with it."""
    codes, scales = places[name], places.get(scale_name)
    if scales is None:
        return f"'{name}' is {codes.kind}, and there is no '{scale_name}' beside it"
    kind = FORMATS["mxfp4"]
    assert kind.block is not None
    *matrices, rows, blocks, nbytes = (1, 1, *codes.kind.shape) if len(codes.kind.shape) < 3 else codes.kind.shape
    if codes.kind.dtype is not torch.uint8 or nbytes != kind.block // 2 or len(codes.kind.shape) < 3:
        return f"'{name}' is {codes.kind}: blocks of MXFP4 are uint8[..., rows, blocks, {kind.block // 2}]"
    if scales.kind.shape != codes.kind.shape[:-1] or scales.kind.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return f"'{scale_name}' is {scales.kind}, which doesn't fit '{name}', {codes.kind}: one byte per block is read"
    shape = (*matrices, rows, blocks * kind.block)
    return Pair(codes, scales, kind.name, shape, (math.prod(matrices), rows, blocks), 1, transposed)
