"""Parts of a checkpoint as files of other programs: safetensors, or a directory of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from zinf_fx.checkpoint.copying import FileRead, PieceMemory, fill, needed_for
from zinf_fx.checkpoint.entries import COMPOSED, FORMATS, SHAPES, ModuleEntry, OptimizerEntry, of_format
from zinf_fx.checkpoint.export import ShardWriter, commit, in_groups, reserve, shards_for
from zinf_fx.checkpoint.files import FILES, LOCK, appear, opened, refusals, unfinished
from zinf_fx.checkpoint.manifest import Manifest, SavedPiece, SavedTensor, check_files
from zinf_fx.checkpoint.safetensors_format import TensorInfo
from zinf_fx.checkpoint.values import decode
from zinf_fx.errors import CheckpointError
from zinf_fx.native.engine import File
from zinf_fx.quantisation import dequantised
from zinf_fx.runtime.memory.host import octets
from zinf_fx.runtime.tensor.boxes import Box, copy_common
from zinf_fx.runtime.tensor.distributed_checkpoint import UnreadBox, chunk_list, own_memory, write_items
from zinf_fx.runtime.tensor.quantised import Quantised
from zinf_fx.sizes import PIECE, pieces_of

if TYPE_CHECKING:  # it takes long to import
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True)
class Values:
    """A saved tensor as other programs are given it.

    Attributes:
        shape: the shape of the values.
        how: how the bytes that are saved become values; None: values are saved.
    """

    saved: SavedTensor
    shape: tuple[int, ...]
    how: Quantised | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.saved.dtype if self.how is None else self.how.dtype

    @property
    def chunks(self) -> list[range]:
        """All elements that are saved, in parts that are read one after the other."""
        whole = Box.whole(self.saved.shape)
        if self.how is None:
            return pieces_of(range(whole.numel), self.dtype.itemsize)
        return [whole.hull(self.source(box)) for box in self.boxes]

    @property
    def boxes(self) -> list[Box]:
        """All values, in such parts: of a quantised tensor some rows each, or all where its rows are columns of what
        is saved; of any other as the pieces are that it is in."""
        whole = Box.whole(self.shape)
        if self.how is None:
            pieces = ((shard.box, piece.elements) for shard in self.saved.boxes for piece in shard.pieces)
            return [box for saved, elements in pieces for box in saved.boxes_of(elements)] or [whole]
        if self.how.transposed:
            return [whole]
        rows, *inner = self.shape
        step = max(PIECE // (whole.numel // rows * self.dtype.itemsize), 1)
        return [Box((row, *(0 for _ in inner)), (min(step, rows - row), *inner)) for row in range(0, rows, step)]

    def source(self, box: Box) -> Box:
        """Return the part of what is saved that a part of the values is made of: one of `boxes`, or all."""
        if self.how is None:
            return box
        if self.how.transposed:
            return Box.whole(self.saved.shape)
        return Box((box.offsets[0], 0), (box.shape[0], self.saved.shape[1]))

    def made_of(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the values that such a part of what is saved stands for: both flat."""
        if self.how is None:
            return elements
        packed = elements.view(-1, self.saved.shape[1])
        values = dequantised(packed, self.how.rows_of(self.shape)[1:], self.how.format, self.how.dtype)
        return (values.mT if self.how.transposed else values).reshape(-1)


def values_in(source: Path, manifest: Manifest, part: str) -> dict[str, Values]:
    """Return all tensors by all of their names; those of a part as values.

    Raises: CheckpointError for what has none that are known without the model.
    """
    by_name = {name: Values(saved, saved.shape) for name, saved in manifest.by_name().items()}
    content = manifest.values.get(part, {})
    for values in filter(None, content.get("ranks", [content])):  # some ranks may not have the part
        for name, (kind, *_) in values.get(COMPOSED, {}).items():
            raise CheckpointError(
                f"converting {source} was refused: '{part}/{name}' is a {kind}, and saved are the tensors that it is "
                "made of, whose values only its class knows: load the checkpoint into the model, make an ordinary "
                "tensor of it, and use export_safetensors()"
            )
        for name, how in values.get(FORMATS, {}).items():
            shape = values.get(SHAPES, {}).get(name)
            if shape is None:
                raise CheckpointError(
                    f"converting {source} was refused: '{part}/{name}' is quantised as {how[0]}, and its shape is not "
                    "in the manifest: load the checkpoint into the model, and use export_safetensors()"
                )
            saved = by_name[f"{part}/{name}"].saved
            by_name[f"{part}/{name}"] = Values(saved, tuple(shape), of_format(how))
    return by_name


@dataclass(frozen=True)
class _InFile:
    """A whole tensor, as what comes next in a file."""

    values: Values
    writer: ShardWriter

    @property
    def box(self) -> Box:
        return Box.whole(self.values.saved.shape)

    @property
    def wanted(self) -> list[range]:
        return [range(self.box.numel)] if self.box.numel else []

    def chunks(self, elements: range) -> list[range]:
        return self.values.chunks  # what is wanted is all

    @contextmanager
    def overwritten(self, elements: range) -> Iterator[torch.Tensor]:
        memory = torch.empty(len(elements), dtype=self.values.saved.dtype, device="cpu")
        yield memory
        values = self.values.made_of(memory)  # whose memory `octets` doesn't keep
        self.writer.write(octets(values))


def to_safetensors(
    source: Path,
    manifest: Manifest,
    part: str,
    target: Path,
    limit: int,
    report: Callable[[int], object],
) -> list[Path]:
    """Write the tensors of a part, such as "model", as `export_safetensors` does; returns the files. Other names of
    one tensor are left out. `limit`: bytes in a file. `report` is told of bytes that were written.

    Raises: CheckpointError, with nothing changed in `target`, when there is no such part, when it is damaged, or for
    what such files can't have; StoreError.
    """
    mine = [tensor.name for tensor in manifest.tensors if tensor.name.startswith(f"{part}/")]
    if not mine:
        names = sorted({tensor.part for tensor in manifest.tensors})
        raise CheckpointError(
            f"the checkpoint in {source} has no tensors of '{part}': it has those of {', '.join(names)}"
        )
    every = values_in(source, manifest, part)
    tensors = {name.removeprefix(f"{part}/"): every[name] for name in mine}
    check_files(source, manifest)
    kinds = {name: TensorInfo(values.dtype, values.shape) for name, values in tensors.items()}
    groups = in_groups(kinds, limit)
    with ExitStack() as rooms:
        folder = rooms.enter_context(unfinished(target, FILES))
        shards = shards_for(groups, folder, target)
        reserve(shards, FILES)
        writer = rooms.enter_context(closing(ShardWriter(FILES)))
        handles = rooms.enter_context(opened([source / file.path for file in manifest.files]))
        for shard in shards:
            writer.begin(shard)
            fill(((tensors[name].saved, _InFile(tensors[name], writer)) for name in shard.places), handles, report)
        writer.finish()
        commit(shards, folder, target, FILES)
    return [target / shard.path.name for shard in shards]


# The file that makes a directory a checkpoint of that library.
_METADATA = ".metadata"


class Pieces:
    """Reads pieces, and has the last: its boxes come one after the other."""

    def __init__(self, report: Callable[[int], object]) -> None:
        """`report` is told of bytes that were read."""
        self.report = report
        self.files: Sequence[File] = ()
        self._memory = PieceMemory()
        self._last: FileRead | None = None

    def read(self, saved: SavedTensor, piece: SavedPiece) -> torch.Tensor:
        """Return the elements, flat. Raises: CheckpointError for other bytes than were saved; StoreError."""
        if self._last is None or self._last.piece is not piece:
            self._last = None
            self._last = FileRead(self.files[piece.file], saved, piece, self._memory)
        return self._last.wait()


class UnreadElements(UnreadBox):
    """A box of the values of a saved tensor. One with all of them has the methods of torch.distributed.checkpoint's
    protocol `_Checkpointable`, which divides it into boxes: those that lie within a piece each, or of some rows."""

    _pieces: Pieces
    _saved_values: Values

    def __new__(cls, pieces: Pieces, values: Values, box: Box) -> Self:
        elements = UnreadBox.__new__(cls, values.dtype, box)
        elements._pieces, elements._saved_values = pieces, values
        return elements

    def value(self) -> torch.Tensor:
        """Return the elements. Raises: CheckpointError, StoreError."""
        saved, source = self._saved_values.saved, self._saved_values.source(self._box)
        mine = range(source.numel)
        elements = own_memory(len(mine) * saved.dtype.itemsize).view(saved.dtype)
        for box, piece in needed_for(saved, source, mine) if mine else ():
            read = self._pieces.read(saved, piece)
            copy_common(elements, source, mine, read, box, piece.elements)
        self._pieces.report(elements.nbytes)
        return self._saved_values.made_of(elements).view(self._box.shape)

    def _of(self, box: Box) -> UnreadElements:
        return UnreadElements(self._pieces, self._saved_values, box)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Return an item for each box."""
        return write_items(name, self, self._boxes.values())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return all boxes."""
        return chunk_list(self._boxes.values())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box that begins there."""
        assert index.offset is not None
        return self._of(self._boxes[tuple(index.offset)])

    @cached_property
    def _boxes(self) -> dict[tuple[int, ...], Box]:
        return {box.offsets: box for box in self._saved_values.boxes}


def convertible(manifest: Manifest) -> list[str]:
    """Return the names of the parts that such a directory can have: models and optimizers."""
    kinds = (ModuleEntry.kind, OptimizerEntry.kind)
    return [name for name, values in manifest.values.items() if values["kind"] in kinds]


def to_distributed(
    source: Path,
    manifest: Manifest,
    parts: Sequence[str],
    target: Path,
    report: Callable[[int], object],
) -> list[Path]:
    """Write parts, such as "model" and "optimizer", as `dcp.save({"model": ..., "optimizer": ...})` does of what
    `get_state_dict` gives; returns the files. `report` is told of bytes of tensors that were read.

    Raises: CheckpointError, with nothing changed in `target`, when a part is none of `convertible`, or can't be named
    as that library names it, when the checkpoint is damaged, or when there is such a directory already; StoreError.
    """
    import torch.distributed.checkpoint as dcp

    pieces = Pieces(report)
    states = {name: _states(source, manifest, name, pieces) for name in parts}
    if (target / _METADATA).exists():
        raise CheckpointError(
            f"converting {source} was refused: {target} has a checkpoint of torch.distributed.checkpoint already; name "
            "another directory, or remove it"
        )
    check_files(source, manifest)
    with unfinished(target, FILES) as folder, opened([source / file.path for file in manifest.files]) as handles:
        pieces.files = handles
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        with refusals("writing what was converted", target), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            try:
                dcp.save(states, storage_writer=writer, no_dist=True)
            except dcp.CheckpointException as error:
                raise _cause_of(error) from None
            written = sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, _METADATA))
            for names in (written, [_METADATA]):
                appear({folder / name: target / name for name in names}, FILES)
    return [target / name for name in (*written, _METADATA)]


def _cause_of(error: dcp.CheckpointException) -> BaseException:
    """Return what failed on the only rank. PyTorch's writer of zip files hides it behind an error of its own."""
    cause = next(cause for cause, _ in error.failures.values())
    while type(cause) is RuntimeError and cause.__context__ is not None:
        cause = cause.__context__
    return cause


def _states(source: Path, manifest: Manifest, part: str, pieces: Pieces) -> dict[str, Any]:
    """Return a part as `get_model_state_dict` or `get_optimizer_state_dict` gives it. Raises: CheckpointError."""
    known = convertible(manifest)
    if part not in known:
        raise CheckpointError(f"the checkpoint in {source} has no '{part}' to convert: it has {', '.join(known)}")
    values = manifest.values[part]
    if "ranks" in values:
        raise CheckpointError(
            f"converting '{part}' of {source} was refused: it was another one on each of {manifest.ranks} ranks; load "
            "the checkpoint with as many ranks, and save it with torch.distributed.checkpoint there"
        )
    by_name = values_in(source, manifest, part).items()
    tensors = {name: UnreadElements(pieces, saved, Box.whole(saved.shape)) for name, saved in by_name}
    if values["kind"] == OptimizerEntry.kind:
        return _of_optimizer(source, part, values, tensors.__getitem__)
    extra = {name: decode(value, tensors.__getitem__) for name, value in values["extra"].items()}
    mine = (name for name in tensors if name.startswith(f"{part}/"))
    return {name.removeprefix(f"{part}/"): tensors[name] for name in mine} | extra


def _of_optimizer(source: Path, part: str, values: Mapping[str, Any], find: Callable[[str], Any]) -> dict[str, Any]:
    groups = [{**decode(group["options"], find), "params": list(group["params"])} for group in values["groups"]]
    if nameless := [name for group in groups for name in group["params"] if name.startswith("#")]:
        raise CheckpointError(
            f"converting '{part}' of {source} was refused: its parameter {nameless[0]} is in none of the models that "
            "were saved with it, and torch.distributed.checkpoint names states by models; leave it out with --part"
        )
    state = {
        name: {key: decode(value, find) for key, value in entry.items()} for name, entry in values["state"].items()
    }
    return {"state": state, "param_groups": groups}
