"""The safetensors format: where in a file each tensor's bytes are.

The safetensors library checks a file when it opens it, but gives tensors whole only. Here bytes are read and written
piece by piece, so this knows the form: the length of the header (8 bytes, little-endian), the header (JSON: of each
tensor its dtype, shape, and where its bytes begin and end), then the bytes of all tensors without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch

from zinf_fx.config import shortened
from zinf_fx.errors import CheckpointError
from zinf_fx.plan.files.parsing import parsed
from zinf_fx.regular_files import open_regular
from zinf_fx.runtime.memory.host import octets
from zinf_fx.runtime.tensor.quantised import Quantised

# By the names that the format has for them. It has more, for which torch has no dtype, such as those of 4 and 6 bits.
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in _NAMES.items()}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}

# Readers that map a file want each tensor's bytes at a multiple of its elements' size.
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor in a file is: its dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of all its elements."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class TensorInFile:
    """A tensor in a file: what it is, and the offset of its first byte.

    Attributes:
        kind: of what is stored: of a quantised tensor, its bytes.
        quantised: how these become values; None: they are values.
    """

    path: Path
    kind: TensorInfo
    offset: int
    quantised: Quantised | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.kind.shape

    @property
    def is_complex(self) -> bool:
        """Whether its values are complex numbers."""
        return self.kind.dtype.is_complex

    @property
    def begin(self) -> tuple[Path, int]:
        """A key that orders tensors as they lie in files."""
        return self.path, self.offset

    def __str__(self) -> str:
        return str(self.kind)


class WeightFiles:
    """The bytes of tensors in files, each of which is opened when it is first asked for."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *args: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def fill(self, memory: torch.Tensor, place: TensorInFile, first: int) -> None:
        """Fill contiguous `memory` with the bytes of a tensor from number `first` on.

        Raises: CheckpointError for a file that is shorter by now; OSError.
        """
        if place.path not in self._open:
            self._open[place.path] = open_regular(place.path)
        left, offset = octets(memory), place.offset + first
        while left:
            count = os.preadv(self._open[place.path], [left], offset)
            if not count:
                raise CheckpointError(
                    f"'{place.path}' ends at byte {offset}, within a tensor: it was changed meanwhile"
                )
            left, offset = left[count:], offset + count

    def read(self, place: TensorInFile, first: int, nbytes: int) -> torch.Tensor:
        """Return so many bytes of a tensor from number `first` on: uint8, flat."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.fill(memory, place, first)
        return memory


def name_of(dtype: torch.dtype) -> str | None:
    """Return what the format calls a dtype; None: it doesn't have it."""
    return _NAME_OF.get(dtype)


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raises: CheckpointError for a dtype that the format doesn't have."""
    if dtype not in _NAME_OF:
        raise CheckpointError(f"{what} has dtype {dtype}, which safetensors files can't have: convert or remove it")


def beginning(header: Mapping[str, object], alignment: int) -> bytes:
    """Return what a file with such a header begins with, a multiple of `alignment` bytes: its length, it, and
    spaces."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def layout(kinds: Mapping[str, TensorInfo], path: Path) -> tuple[bytes, dict[str, TensorInFile]]:
    """Return what a file at `path` with such tensors begins with, and where each is in it, in the order of their
    bytes."""
    by_alignment = sorted(kinds, key=lambda name: -kinds[name].dtype.itemsize)  # stable
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for name in by_alignment:
        kind = kinds[name]
        ends.append(ends[-1] + kind.nbytes)
        header[name] = {"dtype": _NAME_OF[kind.dtype], "shape": kind.shape, "data_offsets": ends[-2:]}
    begin = beginning(header, _ALIGNMENT)
    return begin, {
        name: TensorInFile(path, kinds[name], len(begin) + end) for name, end in zip(by_alignment, ends, strict=False)
    }


def places_in(path: Path) -> dict[str, TensorInFile]:
    """Return where each tensor of a file is.

    Raises: CheckpointError for a file that can't be read, is none of this format or not whole, or has a tensor of a
    dtype that torch doesn't have.
    """
    try:
        with open(open_regular(path), "rb") as file:
            with safetensors.safe_open(path, framework="pt"):
                pass  # checks the header, and that the file is as long as it says
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length).decode()
        header: dict[str, dict] = parsed(text, "its header", "header", CheckpointError)
    except (OSError, ValueError, CheckpointError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"'{path}' can't be read as a safetensors file: {error}. Copy it anew") from error
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        if not name.isprintable():  # it would command the terminal that it is printed on
            raise CheckpointError(f"'{path}' has the tensor {shortened(name)}, whose name can't be printed: rename it")
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"'{name}' in '{path}' has dtype {entry['dtype']}, which torch doesn't have: load it with the library "
                "that wrote it"
            )
        kind = TensorInfo(dtype, tuple(entry["shape"]))
        places[name] = TensorInFile(path, kind, 8 + length + entry["data_offsets"][0])
    return places
