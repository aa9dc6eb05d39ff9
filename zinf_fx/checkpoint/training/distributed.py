"""A checkpoint as a directory of torch.distributed.checkpoint, with the names that its `get_state_dict` gives.

The library is given, for each tensor, the boxes that it is to write. The elements of a box are read when it is pickled,
so that no more than a piece is in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zinf_fx.checkpoint.commit import appear, unfinished
from zinf_fx.checkpoint.files import FILES, LOCK, refusals
from zinf_fx.checkpoint.training.dequantising import Values, values_in
from zinf_fx.checkpoint.training.loading import check_files
from zinf_fx.checkpoint.training.manifest import Manifest, SavedPiece, SavedTensor
from zinf_fx.checkpoint.training.open_files import opened
from zinf_fx.checkpoint.training.parts.module import ModulePart
from zinf_fx.checkpoint.training.parts.optimizer import OptimizerPart
from zinf_fx.checkpoint.training.reading import PieceMemory, Reading, needed_for
from zinf_fx.checkpoint.training.values import decode
from zinf_fx.errors import CheckpointError
from zinf_fx.native.engine import File
from zinf_fx.runtime.tensor.boxes import Box, copy_common
from zinf_fx.runtime.tensor.distributed_checkpoint import UnreadBox, chunk_list, own_memory, write_items

if TYPE_CHECKING:  # it takes long to import
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# The file that makes a directory a checkpoint of that library.
_METADATA = ".metadata"


class Pieces:
    """Reads pieces, and has the last: its boxes come one after the other."""

    def __init__(self, report: Callable[[int], object]) -> None:
        """`report` is told of bytes that were read."""
        self.report = report
        self.files: Sequence[File] = ()
        self._memory = PieceMemory()
        self._last: Reading | None = None

    def read(self, saved: SavedTensor, piece: SavedPiece) -> torch.Tensor:
        """The elements, flat. Raises: CheckpointError for other bytes than were saved; StoreError."""
        if self._last is None or self._last.piece is not piece:
            self._last = None
            self._last = Reading(self.files[piece.file], saved, piece, self._memory)
        return self._last.wait()


class UnreadElements(UnreadBox):
    """A box of the values of a saved tensor. One with all of them has the methods of torch.distributed.checkpoint's
    protocol `_Checkpointable`, which divides it into boxes: those that lie within a piece each, or of some rows."""

    @staticmethod
    def __new__(cls, pieces: Pieces, values: Values, box: Box) -> UnreadElements:
        elements = UnreadBox.__new__(cls, values.dtype, box)
        elements._pieces, elements._values = pieces, values
        return elements

    def value(self) -> torch.Tensor:
        """The elements. Raises: CheckpointError, StoreError."""
        saved, source = self._values.saved, self._values.source(self._box)
        mine = range(source.numel)
        found = own_memory(len(mine) * saved.dtype.itemsize).view(saved.dtype)
        for box, piece in needed_for(saved, source, mine) if mine else ():
            read = self._pieces.read(saved, piece)
            copy_common(found, source, mine, read, box, piece.elements)
        self._pieces.report(found.nbytes)
        return self._values.made_of(found).view(self._box.shape)

    def _of(self, box: Box) -> UnreadElements:
        return UnreadElements(self._pieces, self._values, box)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """One for each box."""
        return write_items(name, self, self._boxes.values())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """All boxes."""
        return chunk_list(self._boxes.values())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The box that begins there."""
        return self._of(self._boxes[tuple(index.offset)])

    @cached_property
    def _boxes(self) -> dict[tuple[int, ...], Box]:
        """By where they begin."""
        return {box.offsets: box for box in self._values.boxes}


def convertible(manifest: Manifest) -> list[str]:
    """The names of the parts that such a directory can have: models and optimizers."""
    kinds = (ModulePart.kind, OptimizerPart.kind)
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
    """What failed on the only rank. PyTorch's writer of zip files hides it behind an error of its own."""
    cause = next(cause for cause, _ in error.failures.values())
    while type(cause) is RuntimeError and cause.__context__ is not None:
        cause = cause.__context__
    return cause


def _states(source: Path, manifest: Manifest, part: str, pieces: Pieces) -> dict[str, Any]:
    """A part as `get_model_state_dict` or `get_optimizer_state_dict` gives it. Raises: CheckpointError."""
    known = convertible(manifest)
    if part not in known:
        raise CheckpointError(f"the checkpoint in {source} has no '{part}' to convert: it has {', '.join(known)}")
    values = manifest.values[part]
    if "ranks" in values:
        raise CheckpointError(
            f"converting '{part}' of {source} was refused: it was another one on each of {manifest.ranks} ranks; load "
            "the checkpoint with as many ranks, and save it with torch.distributed.checkpoint there"
        )
    every = values_in(source, manifest, part).items()
    tensors = {name: UnreadElements(pieces, one, Box.whole(one.shape)) for name, one in every}
    if values["kind"] == OptimizerPart.kind:
        return _of_optimizer(source, part, values, tensors.__getitem__)
    extra = {name: decode(one, tensors.__getitem__) for name, one in values["extra"].items()}
    mine = (name for name in tensors if name.startswith(f"{part}/"))
    return {name.removeprefix(f"{part}/"): tensors[name] for name in mine} | extra


def _of_optimizer(source: Path, part: str, values: Mapping[str, Any], find: Callable[[str], Any]) -> dict[str, Any]:
    groups = [{**decode(group["options"], find), "params": list(group["params"])} for group in values["groups"]]
    if nameless := [name for group in groups for name in group["params"] if name.startswith("#")]:
        raise CheckpointError(
            f"converting '{part}' of {source} was refused: its parameter {nameless[0]} is in none of the models that "
            "were saved with it, and torch.distributed.checkpoint names states by models; leave it out with --part"
        )
    state = {name: {key: decode(one, find) for key, one in entry.items()} for name, entry in values["state"].items()}
    return {"state": state, "param_groups": groups}
