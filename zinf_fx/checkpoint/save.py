"""Saving: what a training consists of goes to data files, and then the manifest makes it a checkpoint."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from zinf_fx.arguments import check_path
from zinf_fx.checkpoint import manifest as names
from zinf_fx.checkpoint.background import BackgroundCopy, Pace
from zinf_fx.checkpoint.catalog import discard_all, proven_in
from zinf_fx.checkpoint.copying import IN_FLIGHT, ShardRange, TensorShard, Transfer, copy
from zinf_fx.checkpoint.entries import Collected, StateEntries, between_steps, modules_in, state_entries, unwritten_in
from zinf_fx.checkpoint.files import FILES, Files, locked, make_directory, make_file, opened, refusals, sync
from zinf_fx.checkpoint.manifest import (
    Manifest,
    Manifests,
    SavedFile,
    SavedPiece,
    SavedTensor,
    ShardMetadata,
    begins_manifest,
    check_sound,
    to_text,
)
from zinf_fx.checkpoint.models import all_ranks, together
from zinf_fx.checkpoint.safetensors_format import beginning, name_of
from zinf_fx.checkpoint.sharing import Snapshot
from zinf_fx.cycles import no_search_for_cycles
from zinf_fx.errors import CheckpointError
from zinf_fx.interrupts import held_back
from zinf_fx.native.engine import File, FileTicket, crc32c_at
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.boxes import Box
from zinf_fx.sizes import PAGE, blocks, in_words

log = logging.getLogger("zinf_fx")

Report = Callable[[int], object]

COPIED_AT_ONCE = 2 << 20
"""Bytes that are written at a time in the background, while twice as many are read: they take little memory."""


def save_checkpoint(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizer | None = None, **extra: object
) -> None:
    """Save a training to a directory, in which it replaces the checkpoint that is there, if any.

    Saved are the model's parameters and persistent buffers, the optimizer's states and options, gradients that were
    accumulated so far, the states of random generators, and `extra`: models with their gradients, optimizers, whatever
    has `state_dict` and `load_state_dict` (schedulers, scalers, samplers), generators, and plain values, which
    `load_checkpoint` returns. No more than some chunks of it are in memory at a time. All ranks of torch.distributed
    call it, and each writes its shards; any number of ranks can load it.

    When it returns, the checkpoint is on the disk. Until then, the one before is the checkpoint, and stays it whatever
    happens; for so long there must be room for both.

    Raises: CheckpointError for what can't be saved, on a full disk, or when another rank fails; OptimizerError after a
    torn step, or in the middle of one that backward began; StoreError. Training and the checkpoint before are as they
    were then.
    """
    check_path(directory, "save_checkpoint")
    save(Path(directory), state_entries(model, optimizer, extra))


@dataclass(frozen=True)
class Background:
    """Says that what has to be copied is copied in the background, where it can be. `bandwidth`: bytes per second, at
    most; None: as `background.Pace` does without."""

    bandwidth: float | None = None


@held_back
@no_search_for_cycles()
def save(
    directory: Path,
    entries: StateEntries,
    files: Files = FILES,
    report: Report = lambda nbytes: None,
    newest: str | None = None,
    replaced: Sequence[Path] = (),
    background: Background | None = None,
    manifests: Manifests | None = None,
) -> BackgroundCopy | None:
    """Save as `save_checkpoint` does. `report` is told of bytes that were written; `newest`: the time in the manifest
    of the checkpoint that this one comes after, whatever the clock says; `replaced`: directories of checkpoints that it
    replaces, too, which are removed when it is there. With `background`, returns what goes on in the background, if
    anything does: see [Note: copies in the background]. `manifests` are told of the manifest that is written."""
    ranks, started = all_ranks(*modules_in(entries)), time.perf_counter()
    directory, *replaced = all_replaced = [path.absolute() for path in (directory, *replaced)]
    with ExitStack() as rooms:
        still = rooms.enter_context(ExitStack())  # in which nothing is changed
        with together("collecting what is to be saved", ranks):
            still.enter_context(between_steps(entries, whole=True))
            collected = Collected(ranks.rank, ranks.size)
            mine = {name: {"kind": entry.kind, **entry.collect(collected)} for name, entry in entries.items()}
            for tiers in {tiers for shard in collected.tensors.values() if (tiers := shard.tiers) is not None}:
                still.enter_context(tiers.stepping())
        values = equal_or_by_rank(ranks, mine)
        ranges = divided(ranks, collected.tensors)
        token = ranks.of_first(secrets.token_hex(4), "the name of a checkpoint's files")
        snapshot = Snapshot(directory, partial(names.link_name, token, ranks.rank), files)
        settled = rooms.enter_context(ExitStack())
        settled.callback(snapshot.settle)
        with together(f"preparing {directory.name}", ranks):
            if ranks.rank == 0:
                rooms.enter_context(_prepared(directory, files, token))
        may_wait = background is not None and ranks.size == 1
        with together(f"keeping what is in the store for {directory.name}", ranks), refusals("saving", directory):
            snapshot.take(ranges, unwritten_in(entries), all_replaced, may_wait=may_wait)
        prepared = _Prepared(directory, files, ranks, token, collected, values, snapshot, _time_after(newest))
        layout = laid_out(snapshot.copied)

        def complete(report: Report, in_flight: int = IN_FLIGHT) -> None:
            manifest = prepared.complete(layout, replaced, manifests or Manifests(), report, in_flight)
            size, how, seconds = in_words(manifest.nbytes), _in_words(snapshot, manifest), time.perf_counter() - started
            log.info("checkpoint of %s saved to %s in %.1f s%s", size, directory, seconds, how)

        if background is None or not snapshot.in_background:
            complete(report)
            return None
        rooms.callback(snapshot.release)
        settled.close()
        still.close()
        pace = Pace(partial(_moved_by_others, snapshot), background.bandwidth)
        open_rooms = rooms.pop_all()

    def complete_in_background() -> None:
        with open_rooms:
            complete(lambda nbytes: (report(nbytes), pace.keep(nbytes)), COPIED_AT_ONCE)

    try:
        return BackgroundCopy(f"copying a checkpoint to {directory} in the background", complete_in_background, pace)
    except BaseException:
        open_rooms.close()
        raise


@dataclass(frozen=True)
class _Prepared:
    """A save whose directory is prepared, and for which all that is in stores is kept as it is.

    Attributes:
        values: the plain values of all entries.
        time: the time in the manifest.
    """

    directory: Path
    files: Files
    ranks: Ranks
    token: str
    collected: Collected
    values: dict[str, Any]
    snapshot: Snapshot
    time: str

    def complete(
        self, layout: Layout, replaced: Sequence[Path], manifests: Manifests, report: Report, in_flight: int
    ) -> Manifest:
        """Copy what is laid out, and commit. Returns the manifest."""
        names_in_order = (names.data_name(self.token, self.ranks.rank, number) for number in range(len(layout.sizes)))
        paths = [self.directory / name for name in names_in_order]
        with refusals(f"saving a checkpoint of {in_words(sum(layout.sizes))}", self.directory):
            sums = _written(self.ranks, self.directory, layout, paths, self.files, report, in_flight)
        report(self.snapshot.shared_nbytes)
        return self._commit(layout, sums, paths, replaced, manifests)

    @no_search_for_cycles()
    def _commit(
        self,
        layout: Layout,
        sums: Sequence[int],
        paths: Sequence[Path],
        replaced: Sequence[Path],
        manifests: Manifests,
    ) -> Manifest:
        directory, ranks, files = self.directory, self.ranks, self.files
        saved = ranks.of_all(self._saved(layout, sums, paths), "what each rank saved")
        manifest = _manifest(saved, self.values, self.time)
        with together(f"committing the checkpoint in {directory.name}", ranks):
            if ranks.rank == 0:
                check_sound(manifest, "the checkpoint to write")
                text = to_text(manifest)
                with refusals("committing a checkpoint", directory):
                    proven = proven_in(directory)
                    names.commit(files, directory, text)
                    manifests.add(directory, manifest)
                    _remove(files, names.leftovers(directory, text, proven))
                discard_all(replaced)
        return manifest

    def _saved(
        self, layout: Layout, sums: Sequence[int], paths: Sequence[Path]
    ) -> tuple[list[SavedTensor], dict[str, str], list[SavedFile]]:
        """Return what this rank has saved: its pieces, the other names of tensors, and its files."""
        links = self.snapshot.files
        pieces: dict[str, list[SavedPiece]] = {}
        for name, piece in self.snapshot.shared:
            pieces.setdefault(name, []).append(piece)
        for place, crc in zip(layout.places, sums, strict=True):
            elements, number = place.copied.elements, len(links) + place.file
            piece = SavedPiece(elements.start, len(elements), number, place.offset, crc)
            pieces.setdefault(place.copied.name, []).append(piece)
        tensors = []
        for name, shard in self.collected.tensors.items():
            metadata = ShardMetadata(shard.box.offsets, shard.box.shape, tuple(pieces.get(name, ())))
            tensors.append(SavedTensor(name, shard.dtype, shard.shape, (metadata,)))
        files = [SavedFile(path.name, nbytes) for path, nbytes in zip(paths, layout.sizes, strict=True)]
        return tensors, self.collected.same, links + files


def _moved_by_others(snapshot: Snapshot) -> int:
    """Return the bytes that stores have moved so far, but for the copies of a snapshot."""
    counters = [store.counters() for store in snapshot.stores]
    return sum(counter.bytes_read + counter.bytes_written for counter in counters) - snapshot.bytes_read


def _in_words(snapshot: Snapshot, manifest: Manifest) -> str:
    """Say how it was saved, if there was a choice."""
    if snapshot.why_copied is not None:
        return f", by copying: {snapshot.why_copied}"
    if not manifest.in_store_nbytes:
        return ""
    copied = manifest.nbytes - manifest.in_store_nbytes
    return f", by generations: {in_words(copied)} copied, the others stay in the store's files"


@contextmanager
def _prepared(directory: Path, files: Files, token: str) -> Iterator[None]:
    """Open a block in which only this process saves to the directory, without what is left of other saves. Where it
    fails, what all ranks wrote under this save's token is removed: other ranks can't know whether it was committed."""
    pid = os.getpid()
    with refusals("making a directory for a checkpoint", directory):
        make_directory(files, directory)
    with locked(directory):
        before = names.manifest_in(directory)
        begins = not before or begins_manifest(directory / names.MANIFEST)
        if not begins and not names.is_what_is_left(before, directory):
            raise CheckpointError(
                f"saving a checkpoint to {directory} was refused: its {names.MANIFEST} is another program's; choose "
                "another directory"
            )
        names.check_is_free(directory)
        _remove(files, names.leftovers(directory, before))
        try:
            yield
        except BaseException:
            if os.getpid() == pid:  # a process made by fork meanwhile may drop what it has of the block
                _remove(files, names.of_failed_save(directory, token))
            raise


def _written(
    ranks: Ranks,
    directory: Path,
    layout: Layout,
    paths: Sequence[Path],
    files: Files,
    report: Report,
    in_flight: int,
) -> list[int]:
    """Write this rank's data files, whose names are on the device then. Returns the checksums of its pieces."""
    with together("reserving space for the checkpoint", ranks):
        for path, nbytes in zip(paths, layout.sizes, strict=True):
            make_file(files, path, nbytes)
    with together("writing the checkpoint", ranks):
        with opened(paths, files) as handles:
            sums = _copied(layout, handles, files, report, in_flight)
        sync(files, directory)
    return sums


def _copied(layout: Layout, handles: Sequence[File], files: Files, report: Report, in_flight: int) -> list[int]:
    """Copy all pieces to their places in the data files, behind the headers of these. Returns their checksums."""
    sums: list[int] = []
    begun = -1

    def write(elements: torch.Tensor, place: PlaceInFile) -> FileTicket:
        nonlocal begun
        if place.file != begun:
            begun = place.file
            header = _in_pages(torch.frombuffer(bytearray(layout.headers[begun]), dtype=torch.uint8))
            files.start_write(handles[begun], header.data_ptr(), 0, header.nbytes, header).wait()
        known = place.copied.shard.checksum(place.copied.elements)
        nbytes = place.copied.nbytes
        sums.append(crc32c_at(elements.data_ptr(), nbytes) if known is None else known)
        if elements.data_ptr() % PAGE or nbytes % PAGE:
            elements = _in_pages(elements)
        return files.start_write(handles[place.file], elements.data_ptr(), place.offset, blocks(nbytes), elements)

    reads = ((place, partial(place.copied.shard.read, place.copied.elements)) for place in layout.places)
    copy((Transfer(place.copied.nbytes, read, place) for place, read in reads), write, report, in_flight)
    return sums


def _in_pages(elements: torch.Tensor) -> torch.Tensor:
    """Return a copy in whole pages, with zeros behind the bytes."""
    pages = aligned_empty(elements.nbytes)
    pages[: elements.nbytes] = elements.contiguous().view(torch.uint8)
    pages[elements.nbytes :] = 0
    return pages


def _manifest(
    saved: Sequence[tuple[list[SavedTensor], dict[str, str], list[SavedFile]]], values: dict[str, Any], time: str
) -> Manifest:
    """Return the manifest of what each rank saved."""
    tensors: list[SavedTensor] = []
    same: dict[str, str] = {}
    files: list[SavedFile] = []
    for tensors_of_rank, same_of_rank, files_of_rank in saved:
        first = len(files)
        tensors += (_moved(tensor, first) for tensor in tensors_of_rank) if files else tensors_of_rank
        same |= same_of_rank
        files += files_of_rank
    return Manifest(
        made_by=f"zinf_fx {version('zinf-fx')}, torch {torch.__version__}",
        time=time,
        ranks=len(saved),
        files=tuple(files),
        tensors=merged(tensors),
        same=tuple(same.items()),
        values=values,
    )


def _time_after(newest: str | None) -> str:
    """Return now, or the second after `newest` where the clock was set back: times order checkpoints."""
    now = datetime.now(UTC)
    if newest is not None:
        now = max(now, datetime.fromisoformat(newest) + timedelta(seconds=1))
    return now.isoformat(timespec="seconds")


def _moved(tensor: SavedTensor, first: int) -> SavedTensor:
    """Return a tensor whose files are counted from `first` on."""
    shards = (
        replace(shard, pieces=tuple(replace(piece, file=piece.file + first) for piece in shard.pieces))
        for shard in tensor.boxes
    )
    return replace(tensor, boxes=tuple(shards))


def _remove(files: Files, paths: Sequence[Path]) -> None:
    """Remove files that are no part of a checkpoint; what stays is removed by the next save."""
    for path in paths:
        try:
            files.remove(path)
        except OSError as error:
            log.warning("%s can't be removed (%s), and is removed by the next save", path, error)


LARGEST_FILE = 4 << 30
"""Bytes of a data file, about: what comes behind them goes to another file."""

LARGEST_PIECE = 8 << 20
"""Bytes of a piece that is copied, at most: several are under way at a time."""


class PlaceInFile(NamedTuple):
    """Elements that are copied, the number of their file, and their offset there."""

    copied: ShardRange
    file: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Which elements are where in which file, and how the files begin and how long they are."""

    places: tuple[PlaceInFile, ...]
    headers: tuple[bytes, ...]
    sizes: tuple[int, ...]


def laid_out(ranges: Iterable[ShardRange], largest: int = LARGEST_FILE) -> Layout:
    """Lay ranges out, in their order, in files of about `largest` bytes at most."""
    files: list[list[list[PlaceInFile]]] = []  # in each file, rows of pieces of one range; offsets are without header
    filled = largest
    for shard_range in ranges:
        row, shard = None, shard_range.shard
        for elements in shard.chunks(shard_range.elements, LARGEST_PIECE):
            piece = ShardRange(shard_range.name, shard, elements)
            if filled + blocks(piece.nbytes) > largest:
                files.append([])
                filled, row = 0, None
            if row is None:
                row = []
                files[-1].append(row)
            row.append(PlaceInFile(piece, len(files) - 1, filled))
            filled += blocks(piece.nbytes)
    headers = [_header(rows) for rows in files]
    places = [
        place._replace(offset=place.offset + len(header))
        for rows, header in zip(files, headers, strict=True)
        for row in rows
        for place in row
    ]
    ends = {place.file: blocks(place.offset + place.copied.nbytes) for place in places}
    return Layout(tuple(places), tuple(headers), tuple(ends[number] for number in range(len(files))))


def _header(rows: Sequence[Sequence[PlaceInFile]]) -> bytes:
    """Return how a safetensors file with these tensors begins, in whole pages. Each is a row of pieces."""
    described: dict[str, dict] = {}
    for row in rows:
        first, last = row[0], row[-1]
        shard, elements = first.copied.shard, range(first.copied.elements.start, last.copied.elements.stop)
        begin, end = first.offset, last.offset + last.copied.nbytes
        shape = list(shard.box.shape) if len(elements) == shard.box.numel else [len(elements)]
        dtype = name_of(shard.dtype)
        if dtype is None:
            dtype, shape = "U8", [end - begin]
        corner = "" if shard.box == Box.whole(shard.shape) else f" from {list(shard.box.offsets)}"
        part = "" if len(elements) == shard.box.numel else f", elements {elements.start} to {elements.stop}"
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        described[first.copied.name + corner + part] = entry
        if (padded := blocks(end)) > end:
            described[f"padding at {end}"] = {"dtype": "U8", "shape": [padded - end], "data_offsets": [end, padded]}
    return beginning(described, PAGE)


Key = tuple[str, tuple[int, ...], tuple[int, ...], int, int]
"""A tensor's name, its box's offsets and shape, and the first element and the one behind the last."""


def divided(ranks: Ranks, tensors: Mapping[str, TensorShard]) -> list[ShardRange]:
    """Return the elements that this rank saves, of those that it has.

    What several ranks have is saved by the one that has least to save so far, if it is stored, and by the first, if it
    is in memory, where ranks may differ.
    """
    ranges = [ShardRange(name, shard, elements) for name, shard in tensors.items() for elements in shard.owned]
    if ranks.size == 1:
        return ranges
    mine = {_key(shard_range): shard_range for shard_range in ranges}
    offers = [(key, shard_range.nbytes, shard_range.shard.is_in_memory) for key, shard_range in mine.items()]
    owners: dict[Key, list[int]] = {}
    described: dict[Key, tuple[int, bool]] = {}
    for rank, offers_of_rank in enumerate(ranks.of_all(offers, "what each rank has to save")):
        for key, nbytes, is_in_memory in offers_of_rank:
            owners.setdefault(key, []).append(rank)
            described[key] = nbytes, is_in_memory
    loads = [0] * ranks.size
    taken: list[Key] = []
    for key, candidates in owners.items():
        nbytes, is_in_memory = described[key]
        saver = candidates[0] if is_in_memory else min(candidates, key=loads.__getitem__)
        loads[saver] += nbytes
        if saver == ranks.rank:
            taken.append(key)
    return [mine[key] for key in taken]


def _key(shard_range: ShardRange) -> Key:
    box = shard_range.shard.box
    return shard_range.name, box.offsets, box.shape, shard_range.elements.start, shard_range.elements.stop


def merged(saved: Iterable[SavedTensor]) -> tuple[SavedTensor, ...]:
    """Join what ranks saved of the same tensors."""
    pieces: dict[str, dict[Box, list[SavedPiece]]] = {}
    first: dict[str, SavedTensor] = {}
    for tensor in saved:
        first.setdefault(tensor.name, tensor)
        for shard in tensor.boxes:
            pieces.setdefault(tensor.name, {}).setdefault(shard.box, []).extend(shard.pieces)

    def in_order(box: Box, pieces: list[SavedPiece]) -> ShardMetadata:
        return ShardMetadata(box.offsets, box.shape, tuple(sorted(pieces, key=lambda piece: piece.start)))

    return tuple(
        replace(tensor, boxes=tuple(in_order(box, of_box) for box, of_box in pieces[name].items()))
        for name, tensor in first.items()
    )


def equal_or_by_rank(ranks: Ranks, values: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values of each entry: once, if all ranks have the same; else those of each rank."""
    of_ranks = ranks.of_all(values, "plain values to save")
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        of_entry = [of_rank.get(name) for of_rank in of_ranks]
        if all(value == of_entry[0] for value in of_entry):
            joined[name] = of_entry[0]
        else:
            kind = next(value["kind"] for value in of_entry if value is not None)
            joined[name] = {"kind": kind, "ranks": of_entry}
    return joined
