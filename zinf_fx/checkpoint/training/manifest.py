"""The manifest of a checkpoint: which elements of which tensor are where in which file, and all plain values.

A tensor is divided into boxes, and the elements of a box, in row-major order, into pieces, each of consecutive bytes in
one file, with the crc32c of these bytes. Files are named relative to the manifest, and lie in its directory; what else
is in them doesn't matter. The manifest ends with the crc32c of its own text before that.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import MAXYEAR, datetime, timedelta
from functools import cached_property
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Annotated, Any

import torch

from zinf_fx.checkpoint.files import lies_within
from zinf_fx.checkpoint.training.files import FIRST_BYTES, FORMAT, is_data, is_link
from zinf_fx.checkpoint.training.plain_values import fault_in
from zinf_fx.config import LARGEST, shortened
from zinf_fx.errors import CheckpointError, DamagedCheckpointError
from zinf_fx.native.engine import crc32c
from zinf_fx.plan.codec import decode, defaults, encode
from zinf_fx.plan.files.parsing import parsed
from zinf_fx.plan.intervals import merged
from zinf_fx.regular_files import open_regular
from zinf_fx.runtime.tensor.boxes import Box
from zinf_fx.sizes import PAGE, PIECE, blocks

SCHEMA = 1
_SUM = ',"crc32c":"{:08x}"}}\n'

# Bytes: saves write some MiB at a time, and a piece is in memory whole when it is read.
_LARGEST_PIECE = 16 * PIECE
_MOST_DIMENSIONS = 64
# Dimensions along which ranks have parts of a tensor.
_MOST_DIVIDED = 6


def begins_manifest(file: Path) -> bool:
    """Whether a file begins as manifests do; what comes behind that may be damaged. Raises: OSError."""
    with open(open_regular(file), "rb") as opened:
        return opened.read(len(FIRST_BYTES)) == FIRST_BYTES


def _as_it_is(value: object, name: str) -> object:
    """What is read where the form is another one's matter."""
    return value


@dataclass(frozen=True)
class SavedPiece:
    """Consecutive elements of a box.

    Attributes:
        start, count: which elements.
        file: the number of the file that has them; `offset`: bytes before them there.
        crc32c: of their bytes.
        padding: bytes behind them that the checksum is of, too.
    """

    start: Annotated[int, 0]
    count: Annotated[int, 1]
    file: Annotated[int, 0]
    offset: Annotated[int, 0]
    crc32c: Annotated[int, 0]
    padding: Annotated[int, 0] = 0

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of elements of such a dtype, and of what is behind them."""
        return self.count * dtype.itemsize + self.padding

    @property
    def elements(self) -> range:
        """Which elements of the box."""
        return range(self.start, self.start + self.count)


@dataclass(frozen=True)
class SavedBox:
    """A part of a tensor between two corners, and the pieces that it is in, in order."""

    offsets: tuple[Annotated[int, 0], ...]
    shape: tuple[Annotated[int, 0], ...]
    pieces: tuple[SavedPiece, ...]

    @property
    def box(self) -> Box:
        """Which elements of the tensor."""
        return Box(self.offsets, self.shape)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor by its name: "PART/NAME", such as "model/head.weight" or "optimizer/head.weight.exp_avg"."""

    name: str
    dtype: torch.dtype
    shape: tuple[Annotated[int, 0], ...]
    boxes: tuple[SavedBox, ...]

    @property
    def part(self) -> str:
        """The name of the part that it is of."""
        return re.split(r"[/.\[@]", self.name, maxsplit=1)[0]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SavedFile:
    """A file with pieces: its path within the manifest's directory, and its size in bytes.

    One `of_store` is a data file of the store that the tensors were in, where they have stayed: it has other bytes,
    too, and may have become longer.
    """

    path: str
    nbytes: Annotated[int, 0]
    of_store: bool = False


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        made_by: versions of what wrote it.
        time: when, in UTC.
        ranks: how many wrote it.
        same: names of tensors, each with the name of the one that it is, too (tied weights).
        values: plain values by part, as `values.encode` makes them.
    """

    made_by: str
    time: str
    ranks: Annotated[int, 1]
    files: tuple[SavedFile, ...]
    tensors: tuple[SavedTensor, ...]
    same: tuple[tuple[str, str], ...] = ()
    values: Annotated[dict[str, Any], _as_it_is] = field(default_factory=dict, compare=False)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def in_store_nbytes(self) -> int:
        """Of the pieces in files of a store."""
        in_store = {number for number, file in enumerate(self.files) if file.of_store}
        return sum(one.count * tensor.dtype.itemsize for tensor, one in self.pieces() if one.file in in_store)

    def taken_of(self, file: SavedFile) -> int:
        """Bytes of a file that are of this checkpoint: all, but of a store's."""
        return sum(map(len, self.content_of(file.path))) if file.of_store else file.nbytes

    def content_of(self, path: str) -> list[range]:
        """Where pieces are in a file, in bytes, in whole pages."""
        return self._contents[[file.path for file in self.files].index(path)]

    @cached_property
    def _contents(self) -> list[list[range]]:
        """The same, of all files: one that looked for its pieces by itself would look at those of all."""
        pages: list[list[range]] = [[] for _ in self.files]
        for tensor, piece in self.pieces():
            end = piece.offset + piece.count * tensor.dtype.itemsize
            pages[piece.file].append(range(piece.offset // PAGE * PAGE, blocks(end)))
        return [merged(one) for one in pages]

    def pieces(self) -> Iterator[tuple[SavedTensor, SavedPiece]]:
        """All pieces, each with its tensor."""
        for tensor in self.tensors:
            for box in tensor.boxes:
                for piece in box.pieces:
                    yield tensor, piece

    def is_in(self, fd: int, path: str) -> bool:
        """Whether an open file has what is said of the file `path`, as far as the checksum of a piece shows that."""
        number = [file.path for file in self.files].index(path)
        for tensor, piece in self.pieces():
            if piece.file == number:
                return crc32c(os.pread(fd, piece.nbytes(tensor.dtype), piece.offset)) == piece.crc32c
        return False

    def by_name(self) -> dict[str, SavedTensor]:
        """The tensors by all names that they have."""
        found = {tensor.name: tensor for tensor in self.tensors}
        return found | {name: found[other] for name, other in self.same}


def to_text(manifest: Manifest) -> bytes:
    """The content of a manifest's file."""
    content = {"format": FORMAT, "schema": SCHEMA, **_described(manifest)}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, default=_described).encode()
    return text[:-1] + _SUM.format(crc32c(text[:-1])).encode()


def _described(value: object) -> Any:
    """What JSON has no form of its own for, as `codec.encode` has it: that would look at each number."""
    if isinstance(value, torch.dtype):
        return encode(value)
    return {name: one for name, default in defaults(type(value)).items() if (one := getattr(value, name)) != default}


def from_text(content: bytes, what: str) -> Manifest:
    """The manifest that a file has. `what` names it in errors.

    Raises: CheckpointError for whatever isn't a sound one.
    """
    length = len(_SUM.format(0))
    if content[-length:] != _SUM.format(crc32c(content[:-length])).encode():
        raise DamagedCheckpointError(
            f"{what} is damaged, or no manifest of a checkpoint: its last {length} bytes are not the checksum of the "
            "others; use another checkpoint"
        )
    found = parsed(content[:-length].decode("utf-8", "replace") + "}", what, "manifest", CheckpointError)
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise CheckpointError(f'{what} is JSON, but no manifest: it has no field "format" with the value {FORMAT!r}')
    schema = found.pop("schema", None)
    if schema != SCHEMA:
        raise CheckpointError(f"{what} has schema {schema!r}, and this version of zinf_fx reads {SCHEMA}: use that one")
    manifest = decode(Manifest, found, what, CheckpointError)
    check_sound(manifest, what)
    return manifest


def check_sound(manifest: Manifest, what: str) -> None:
    """Raises: CheckpointError where pieces lie outside of their files or on each other, files outside of the directory,
    or boxes are not all of their tensor, and for values of no part's form."""
    _check_time(manifest.time, what)
    _check_files(manifest.files, what)
    if (fault := fault_in(manifest.values)) is not None:
        raise CheckpointError(f"{what}: {fault}; use another checkpoint")
    names = [tensor.name for tensor in manifest.tensors]
    known, others = set(names), [name for name, _ in manifest.same]
    is_twice = len({*names, *others}) != len(names) + len(others)
    if is_twice or any(other not in known for _, other in manifest.same):
        raise CheckpointError(f"{what} has a tensor twice, or the name of one that is not there")
    for tensor in manifest.tensors:
        _check_tensor(tensor, manifest.files, what)
    by_file: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    for tensor, piece in manifest.pieces():
        by_file[piece.file].append((piece.offset, piece.offset + piece.nbytes(tensor.dtype), tensor.name))
    for places in by_file:
        for (_, end, _), (start, _, name) in pairwise(sorted(places)):
            if start < end:
                raise CheckpointError(f"{what}: a piece of '{name}' lies where another one does")


def _check_time(time: str, what: str) -> None:
    try:
        when = datetime.fromisoformat(time)
    except ValueError:
        when = None
    is_ours = when is not None and when.utcoffset() == timedelta(0) and when.isoformat(timespec="seconds") == time
    if not is_ours or when.year == MAXYEAR:
        raise CheckpointError(f"{what} has the time {shortened(time)}, which is none that a save writes")


def _check_files(files: Sequence[SavedFile], what: str) -> None:
    for file in files:
        if not lies_within(file.path):
            path = shortened(file.path)
            raise CheckpointError(f"{what} names the file {path}, which is not in its directory: use another")
        if not is_data(file.path) or file.of_store != is_link(file.path):
            path = shortened(file.path)
            raise CheckpointError(f"{what} names the file {path}, which is none that a save writes: use another")
    if len({file.path for file in files}) != len(files):
        raise CheckpointError(f"{what} names a file twice")


def _check_tensor(tensor: SavedTensor, files: Sequence[SavedFile], what: str) -> None:
    dimensions, itemsize = len(tensor.shape), tensor.dtype.itemsize
    if dimensions > _MOST_DIMENSIONS or math.prod(max(size, 1) for size in tensor.shape) * itemsize > LARGEST:
        raise CheckpointError(f"{what}: '{tensor.name}' has a shape of {dimensions} dimensions that no tensor has")
    whole, boxes = Box.whole(tensor.shape), [one.box for one in tensor.boxes]
    if boxes != [whole] and not _make_up(whole, boxes):
        raise CheckpointError(f"{what}: the boxes of '{tensor.name}' are not all of it, each element once")
    for box in tensor.boxes:
        ends = list(accumulate((piece.count for piece in box.pieces), initial=0))
        if [*(piece.start for piece in box.pieces), math.prod(box.shape)] != ends:
            raise CheckpointError(f"{what}: the pieces of '{tensor.name}' are not all of it, each element once")
        for piece in box.pieces:
            nbytes = piece.nbytes(tensor.dtype)
            if piece.file >= len(files) or piece.offset + nbytes > files[piece.file].nbytes:
                raise CheckpointError(f"{what}: a piece of '{tensor.name}' lies behind the end of its file")
            if nbytes > _LARGEST_PIECE or piece.padding >= PAGE:
                raise CheckpointError(f"{what}: a piece of '{tensor.name}' has {nbytes} bytes, more than saves write")


def _make_up(whole: Box, boxes: list[Box]) -> bool:
    """Whether each element of a whole is in one box, and in no other.

    It is where the corners of all boxes are those of the whole once those are left out that cancel each other: in n
    dimensions, the differences of how often elements are there are not zero at corners alone, by turns 1 and -1, and
    they say how often each element is there.
    """
    if any(len(box.offsets) != len(whole.shape) or len(box.shape) != len(whole.shape) for box in boxes):
        return False
    divided = [
        dim
        for dim, size in enumerate(whole.shape)
        if any(box.offsets[dim] or box.shape[dim] != size for box in boxes if box.numel)
    ]
    if len(divided) > _MOST_DIVIDED or not whole.numel:
        return not whole.numel and not any(box.numel for box in boxes)
    left: Counter[tuple[int, ...]] = Counter()
    for box, sign in [(whole, -1), *((box, 1) for box in boxes if box.numel)]:
        ends = (((box.offsets[dim], 1), (box.offsets[dim] + box.shape[dim], -1)) for dim in divided)
        for corner in product(*ends):
            left[tuple(place for place, _ in corner)] += sign * math.prod(one for _, one in corner)
    return not any(left.values())
