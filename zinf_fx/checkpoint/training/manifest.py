"""The manifest of a checkpoint: which elements of which tensor are where in which file, and all plain values.

A tensor is divided into boxes, and the elements of a box, in row-major order, into pieces, each of consecutive bytes in
one file, with the crc32c of these bytes. Files are named relative to the manifest, and lie in its directory; what else
is in them doesn't matter. The manifest ends with the crc32c of its own text before that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch

from zinf_fx.checkpoint.files import lies_within
from zinf_fx.errors import CheckpointError, DamagedCheckpointError
from zinf_fx.native.engine import crc32c
from zinf_fx.plan.codec import decode, defaults, encode
from zinf_fx.plan.files.parsing import parsed
from zinf_fx.plan.intervals import merged
from zinf_fx.runtime.tensor.boxes import Box
from zinf_fx.sizes import PAGE, blocks

FORMAT, SCHEMA = "zinf_fx checkpoint", 1
_SUM = ',"crc32c":"{:08x}"}}\n'


_BEGIN = f'{{"format":"{FORMAT}"'.encode()


def begins_manifest(file: Path) -> bool:
    """Whether a file begins as manifests do; what comes behind that may be damaged. Raises: OSError."""
    with file.open("rb") as opened:
        return opened.read(len(_BEGIN)) == _BEGIN


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
    if not isinstance(manifest.values, dict):
        raise CheckpointError(f"{what} has no plain values by part: it is no manifest of this version")
    check_sound(manifest, what)
    return manifest


def check_sound(manifest: Manifest, what: str) -> None:
    """Raises: CheckpointError where pieces lie outside of their files, files outside of the directory, or boxes are not
    all of their tensor."""
    for file in manifest.files:
        if not lies_within(file.path):
            raise CheckpointError(f"{what} names the file {file.path!r}, which is not in its directory: use another")
    sizes = [file.nbytes for file in manifest.files]
    names = [tensor.name for tensor in manifest.tensors]
    known = set(names)
    if len(known) != len(names) or any(name in known or other not in known for name, other in manifest.same):
        raise CheckpointError(f"{what} has a tensor twice, or the name of one that is not there")
    for tensor in manifest.tensors:
        whole, itemsize = Box.whole(tensor.shape), tensor.dtype.itemsize
        boxes = [one.box for one in tensor.boxes]
        if boxes != [whole] and not _make_up(whole, boxes):
            raise CheckpointError(f"{what}: the boxes of '{tensor.name}' are not all of it, each element once")
        for box in tensor.boxes:
            ends = list(accumulate((piece.count for piece in box.pieces), initial=0))
            if [*(piece.start for piece in box.pieces), math.prod(box.shape)] != ends:
                raise CheckpointError(f"{what}: the pieces of '{tensor.name}' are not all of it, each element once")
            for piece in box.pieces:
                end = piece.offset + piece.count * itemsize + piece.padding
                if piece.file >= len(sizes) or end > sizes[piece.file]:
                    raise CheckpointError(f"{what}: a piece of '{tensor.name}' lies behind the end of its file")


def _make_up(whole: Box, boxes: list[Box]) -> bool:
    """Whether each element of a whole is in one box."""
    inside = all(len(box.shape) == len(whole.shape) and _contains(whole, box) for box in boxes)
    return inside and sum(box.numel for box in boxes) == whole.numel and not _overlap(boxes)


def _contains(whole: Box, box: Box) -> bool:
    return all(start + size <= end for start, size, end in zip(box.offsets, box.shape, whole.shape, strict=True))


def _overlap(boxes: list[Box]) -> bool:
    """Whether any two have an element in common. Those that differ in their first place only are looked at in order."""
    filled = sorted(box for box in boxes if box.numel)
    rows = all(box.offsets[1:] == filled[0].offsets[1:] and box.shape[1:] == filled[0].shape[1:] for box in filled)
    pairs = pairwise(filled) if rows else ((a, b) for n, a in enumerate(filled) for b in filled[:n])
    return any(one.within(other) is not None for one, other in pairs)
