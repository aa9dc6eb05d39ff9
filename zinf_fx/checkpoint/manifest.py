"""The manifest of a checkpoint: which elements of which tensor are where in which file, and all plain values.

A tensor is divided into shards, which are boxes, and the elements of a box, in row-major order, into pieces. A piece
has consecutive bytes in one file, with the crc32c of these bytes. Files are named relative to the manifest, and lie in
its directory; what else is in them doesn't matter. The manifest ends with the crc32c of its own text before that.

[Note: commits]
Data files have names that no save used before. When their bytes are on the device, and their names too, the manifest
is written under a name of its own, synced, and renamed to `manifest.json`; then the directory is synced. So the name
`manifest.json` stands for the old checkpoint or for the new one, whatever of the last operations a crash undoes, and in
whatever order they reach the device. What the manifest doesn't name is removed behind that, or by the next save.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import MAXYEAR, datetime, timedelta
from functools import cached_property
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Annotated, Any

import torch

from zinf_fx.checkpoint.files import Files, appear, lies_within, refusals
from zinf_fx.checkpoint.values import fault_in
from zinf_fx.config import LARGEST, shortened
from zinf_fx.errors import CheckpointError, DamagedCheckpointError
from zinf_fx.native.engine import crc32c
from zinf_fx.plan.codec import decode, defaults, encode
from zinf_fx.plan.files.parsing import parsed
from zinf_fx.plan.intervals import merged
from zinf_fx.regular_files import open_regular, read_regular
from zinf_fx.runtime.disk.ownership import is_alike, is_proven
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
    """Decode nothing: `values` checks the form."""
    return value


@dataclass(frozen=True)
class SavedPiece:
    """Consecutive elements of a box.

    Attributes:
        start, count: the first element, and how many there are.
        file: the number of the file that has them; `offset`: bytes before them there.
        crc32c: the checksum of their bytes and of the padding.
        padding: bytes behind them, up to the end of a page.
    """

    start: Annotated[int, 0]
    count: Annotated[int, 1]
    file: Annotated[int, 0]
    offset: Annotated[int, 0]
    crc32c: Annotated[int, 0]
    padding: Annotated[int, 0] = 0

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the elements, of such a dtype, and of the padding."""
        return self.count * dtype.itemsize + self.padding

    @property
    def elements(self) -> range:
        """The numbers of the elements in the box."""
        return range(self.start, self.start + self.count)


@dataclass(frozen=True)
class ShardMetadata:
    """A shard of a tensor, which is a box, and the pieces that it is in, in order."""

    offsets: tuple[Annotated[int, 0], ...]
    shape: tuple[Annotated[int, 0], ...]
    pieces: tuple[SavedPiece, ...]

    @property
    def box(self) -> Box:
        """The elements of the tensor that the shard has."""
        return Box(self.offsets, self.shape)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor by its name, "ENTRY/NAME", such as "model/head.weight" or "optimizer/head.weight.exp_avg", and its
    shards."""

    name: str
    dtype: torch.dtype
    shape: tuple[Annotated[int, 0], ...]
    boxes: tuple[ShardMetadata, ...]

    @property
    def part(self) -> str:
        """The name of the state entry that it belongs to."""
        return re.split(r"[/.\[@]", self.name, maxsplit=1)[0]

    @property
    def nbytes(self) -> int:
        """The size of all elements."""
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
        values: plain values by state entry, as `values.encode` makes them.
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
        """The size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def in_store_nbytes(self) -> int:
        """The size of the pieces in files of a store."""
        in_store = {number for number, file in enumerate(self.files) if file.of_store}
        return sum(piece.count * tensor.dtype.itemsize for tensor, piece in self.pieces() if piece.file in in_store)

    def taken_of(self, file: SavedFile) -> int:
        """Return the bytes of a file that belong to this checkpoint: all, except in a store's file."""
        return sum(map(len, self.content_of(file.path))) if file.of_store else file.nbytes

    def content_of(self, path: str) -> list[range]:
        """Return the bytes of a file in which pieces are, in whole pages."""
        return self._contents[[file.path for file in self.files].index(path)]

    @cached_property
    def _contents(self) -> list[list[range]]:
        """The pages of all files: to find those of one file, all pieces have to be looked at."""
        pages: list[list[range]] = [[] for _ in self.files]
        for tensor, piece in self.pieces():
            end = piece.offset + piece.count * tensor.dtype.itemsize
            pages[piece.file].append(range(piece.offset // PAGE * PAGE, blocks(end)))
        return [merged(pages_of_file) for pages_of_file in pages]

    def pieces(self) -> Iterator[tuple[SavedTensor, SavedPiece]]:
        """Give all pieces, each with its tensor."""
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
        """Return the tensors by all names that they have."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        return by_name | {name: by_name[original] for name, original in self.same}


def to_text(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file."""
    content = {"format": FORMAT, "schema": SCHEMA, **_described(manifest)}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, default=_described).encode()
    return text[:-1] + _SUM.format(crc32c(text[:-1])).encode()


def _described(value: object) -> Any:
    """What JSON has no form of its own for, as `codec.encode` has it: that would look at each number."""
    if isinstance(value, torch.dtype):
        return encode(value)
    return {name: own for name, default in defaults(type(value)).items() if (own := getattr(value, name)) != default}


def from_text(content: bytes, what: str) -> Manifest:
    """Return the manifest that a file has. `what` names it in errors.

    Raises: CheckpointError for whatever isn't a sound one.
    """
    length = len(_SUM.format(0))
    if content[-length:] != _SUM.format(crc32c(content[:-length])).encode():
        raise DamagedCheckpointError(
            f"{what} is damaged, or no manifest of a checkpoint: its last {length} bytes are not the checksum of the "
            "others; use another checkpoint"
        )
    fields = parsed(content[:-length].decode("utf-8", "replace") + "}", what, "manifest", CheckpointError)
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise CheckpointError(f'{what} is JSON, but no manifest: it has no field "format" with the value {FORMAT!r}')
    schema = fields.pop("schema", None)
    if schema != SCHEMA:
        raise CheckpointError(f"{what} has schema {schema!r}, and this version of zinf_fx reads {SCHEMA}: use that one")
    manifest = decode(Manifest, fields, what, CheckpointError)
    check_sound(manifest, what)
    return manifest


def check_sound(manifest: Manifest, what: str) -> None:
    """Raises: CheckpointError where pieces lie outside of their files or on each other, files outside of the directory,
    or boxes are not all of their tensor, and for values of no entry's form."""
    _check_time(manifest.time, what)
    _check_files(manifest.files, what)
    if (fault := fault_in(manifest.values)) is not None:
        raise CheckpointError(f"{what}: {fault}; use another checkpoint")
    names = [tensor.name for tensor in manifest.tensors]
    known, aliases = set(names), [name for name, _ in manifest.same]
    is_twice = len({*names, *aliases}) != len(names) + len(aliases)
    if is_twice or any(original not in known for _, original in manifest.same):
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
    if when is None or not is_ours or when.year == MAXYEAR:
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
    whole, boxes = Box.whole(tensor.shape), [shard.box for shard in tensor.boxes]
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
            left[tuple(place for place, _ in corner)] += sign * math.prod(side for _, side in corner)
    return not any(left.values())


log = logging.getLogger("zinf_fx")

MANIFEST, NEW_MANIFEST = "manifest.json", "manifest.json.new"
FORMAT = "zinf_fx checkpoint"
FIRST_BYTES = f'{{"format":"{FORMAT}"'.encode()
"""Every manifest begins with these."""

# Bytes that tell the files that are written here from others.
_BEGIN = 64
_DATA = re.compile(r"data-[0-9a-f]{8}-(?P<rank>[0-9]{1,9})-[0-9]{1,9}\.(safetensors|extents)")
# Bytes: of a manifest of ten trillion parameters.
_LARGEST_MANIFEST = 4 << 30


def data_name(save: str, rank: int, number: int) -> str:
    """Return the name of a data file, by its save, rank and number."""
    return f"data-{save}-{rank}-{number}.safetensors"


def link_name(save: str, rank: int, number: int) -> str:
    """Return the name of a store's data file in a checkpoint."""
    return f"data-{save}-{rank}-{number}.extents"


def rank_of(name: str) -> int | None:
    """Return the rank that saved a data file; None for other names."""
    match = _DATA.fullmatch(name)
    return None if match is None else int(match["rank"])


def read_manifest(directory: Path) -> bytes:
    """Return the content of a checkpoint's manifest. Raises: CheckpointError when there is none, saying what there
    is."""
    path = directory / MANIFEST
    try:
        return read_regular(path, _LARGEST_MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no checkpoint to load: {_instead(directory)}") from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CheckpointError(
                f"{path} has more than {_LARGEST_MANIFEST} bytes, and no manifest has: it is another file"
            ) from None
        with refusals("reading a checkpoint", path):
            raise error


def manifest_in(directory: Path) -> bytes:
    """Return the content of a directory's manifest; nothing, if there is none."""
    return read_manifest(directory) if os.path.lexists(directory / MANIFEST) else b""


def _instead(directory: Path) -> str:
    if not directory.exists():
        return "there is no such directory; name one that save_checkpoint() wrote"
    if leftovers(directory, b""):
        return f"a save was cut off before it wrote {MANIFEST}, and what it left is no checkpoint; use another one"
    return f"there is no {MANIFEST} in it; name a directory that save_checkpoint() wrote"


def is_data(name: str) -> bool:
    """Whether a file's name is one of a data file."""
    return _DATA.fullmatch(name) is not None


def is_link(name: str) -> bool:
    """Whether the name of a data file is one of a store's."""
    return name.endswith(".extents")


def is_ours(name: str) -> bool:
    """Whether a file's name is one that makes a checkpoint, or is left of one."""
    return name in (MANIFEST, NEW_MANIFEST) or is_data(name)


def leftovers(directory: Path, manifest: bytes, proven: Collection[Path] = ()) -> list[Path]:
    """Return what saves left in a directory that were cut off: files with our names, and what these say, that are
    nowhere in the manifest's text, which may be empty, or damaged. `proven`: those that are known to be what their
    names say."""
    with refusals("looking for what is left of a save", directory):
        present = sorted(os.listdir(directory))
    unlisted = (name for name in present if name != MANIFEST and is_ours(name) and name.encode() not in manifest)
    return [path for path in (directory / name for name in unlisted) if path in proven or _is_as_named(path)]


def _is_as_named(path: Path) -> bool:
    """Whether a file is what its name says, as far as a save that was cut off wrote it: its beginning may be zeros. One
    that only has the name may be anybody's."""
    try:
        fd = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        begin = os.pread(fd, _BEGIN, 0)
        if not begin.strip(b"\0"):
            return True
        if path.name == NEW_MANIFEST:
            return begin.startswith(FIRST_BYTES[: len(begin)])
        if is_link(path.name):
            return is_proven(fd) or (is_alike(fd) and os.fstat(fd).st_nlink > 1)  # which stays under another name
        return (8 + int.from_bytes(begin[:8], "little")) % PAGE == 0 and begin[8:9] in (b"{", b"\0")
    finally:
        os.close(fd)


def is_what_is_left(manifest: bytes, directory: Path) -> bool:
    """Whether the content of a `manifest.json`, which doesn't begin as ours, is what damage left of ours: that is no
    JSON, as another program's is, and lies beside data files of ours."""
    try:
        json.loads(manifest)
    except ValueError:
        return any(path.name != NEW_MANIFEST for path in leftovers(directory, b""))
    except RecursionError:  # JSON, nested deeply
        pass
    return False


def check_is_free(directory: Path) -> None:
    """Raises: CheckpointError where the name that a new manifest has until it is whole is somebody else's."""
    new = directory / NEW_MANIFEST
    if os.path.lexists(new) and not _is_as_named(new):
        raise CheckpointError(
            f"saving a checkpoint to {directory} was refused: its {NEW_MANIFEST} is another program's; move it "
            "elsewhere"
        )


def of_failed_save(directory: Path, save: str) -> list[Path]:
    """Return what a save that failed wrote: none of it when its manifest is that of the directory, in spite of the
    failure."""
    left = leftovers(directory, manifest_in(directory))
    return [path for path in left if path.name == NEW_MANIFEST or path.name.startswith(f"data-{save}-")]


def commit(files: Files, directory: Path, manifest: bytes) -> None:
    """Make the manifest that of the directory: see [Note: commits]. Its data files are on the device."""
    new = directory / NEW_MANIFEST
    files.remove(new)
    fd = files.create(new)
    try:
        files.write(fd, manifest)
    finally:
        os.close(fd)
    appear({new: directory / MANIFEST}, files)


def manifest_of(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises: CheckpointError when there is none, or it is damaged."""
    return from_text(read_manifest(directory), str(directory / MANIFEST))


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raises: CheckpointError for a file of a checkpoint that is missing, or has another size."""
    for file in manifest.files:
        check_file(directory, file)


def check_file(directory: Path, file: SavedFile) -> None:
    """Raises: CheckpointError unless a file is there as it was saved."""
    path = directory / file.path
    try:
        info = path.stat()
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"the checkpoint in {directory} is damaged: its file {file.path} is missing; use another one"
        ) from None
    except OSError as error:
        with refusals("looking for a data file", path):
            raise error
    if not stat.S_ISREG(info.st_mode):
        raise DamagedCheckpointError(
            f"the checkpoint in {directory} is damaged: {file.path} is no file; use another one"
        )
    if info.st_size < file.nbytes or (info.st_size > file.nbytes and not file.of_store):
        raise DamagedCheckpointError(
            f"the checkpoint in {directory} is damaged: its file {file.path} has {info.st_size} bytes, and "
            f"{file.nbytes} when it was saved; use another one"
        )


class Manifests:
    """The manifests of checkpoints. One is read again only if its file has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...] | None, Manifest]] = {}

    def read(self, directory: Path) -> Manifest:
        """Return the manifest of a checkpoint, as `manifest_of` does."""
        known, file = self._known.get(directory), _identity(directory / MANIFEST)
        if known is None or known[0] != file:
            known = file, manifest_of(directory)
            current = (path for path, (read, _) in self._known.items() if read == _identity(path / MANIFEST))
            self._known = {path: self._known[path] for path in current} | {directory: known}
        return known[1]

    def add(self, directory: Path, manifest: Manifest) -> None:
        """Note a manifest that was written."""
        self._known[directory] = _identity(directory / MANIFEST), manifest


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return a key that changes when a file is replaced or changed; None: there is no file."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
