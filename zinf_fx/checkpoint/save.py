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
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.arguments import check_path
from zinf_fx.checkpoint import manifest as names
from zinf_fx.checkpoint.background import CopyBehind, Pace
from zinf_fx.checkpoint.copying import IN_FLIGHT, Holding, PlaceInFile, SavedRun, Transfer, copy
from zinf_fx.checkpoint.entries import LARGEST, Collected, Parts, between_steps, modules_in, parts_of, unwritten_in
from zinf_fx.checkpoint.files import FILES, Files, locked, make_directory, make_file, opened, refusals, sync
from zinf_fx.checkpoint.garbage_collection import discard_all, proven_in
from zinf_fx.checkpoint.manifest import (
    Manifest,
    Manifests,
    SavedBox,
    SavedFile,
    SavedPiece,
    SavedTensor,
    begins_manifest,
    check_sound,
    to_text,
)
from zinf_fx.checkpoint.models import all_ranks, together
from zinf_fx.checkpoint.safetensors_format import beginning, name_of
from zinf_fx.checkpoint.sharing import Frozen, KeptInStore, NotFrozenError
from zinf_fx.cycles import no_search_for_cycles
from zinf_fx.errors import CheckpointError
from zinf_fx.interrupts import held_back
from zinf_fx.native.engine import File, FileTicket, crc32c_at
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.boxes import Box
from zinf_fx.sizes import PAGE, blocks, in_words

log = logging.getLogger("zinf_fx")

Report = Callable[[int], object]

COPIED_AT_ONCE = 2 << 20
"""Bytes that are written at a time behind training, while twice as many are read: of its memory, little is taken."""


def save_checkpoint(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizer | None = None, **extra: object
) -> None:
    """Save a training to a directory, in which it replaces the checkpoint that is there, if any.

    Saved are the model's parameters and persistent buffers, the optimizer's states and options, gradients that were
    accumulated so far, the states of random generators, and `extra`: models with their gradients, optimizers, whatever
    has `state_dict` and `load_state_dict` (schedulers, scalers, samplers), generators, and plain values, which
    `load_checkpoint` returns. No more than some chunks of it are in memory at a time. All ranks of torch.distributed
    call it, and each writes its shares; any number of ranks can load it.

    When it returns, the checkpoint is on the disk. Until then, the one before is the checkpoint, and stays it whatever
    happens; for so long there must be room for both.

    Raises: CheckpointError for what can't be saved, on a full disk, or when another rank fails; OptimizerError after a
    torn step, or in the middle of one that backward began; StoreError. Training and the checkpoint before are as they
    were then.
    """
    check_path(directory, "save_checkpoint")
    save(Path(directory), parts_of(model, optimizer, extra))


@dataclass(frozen=True)
class Behind:
    """That bytes are to be copied behind training, where they have to be copied. `bandwidth`: bytes per second, at
    most; None: as `behind.Pace` does without."""

    bandwidth: float | None = None


@held_back
@no_search_for_cycles()
def save(
    directory: Path,
    parts: Parts,
    files: Files = FILES,
    report: Report = lambda nbytes: None,
    newest: str | None = None,
    others: Sequence[Path] = (),
    behind: Behind | None = None,
    manifests: Manifests | None = None,
) -> CopyBehind | None:
    """As `save_checkpoint`. `report` is told of bytes that were written; `newest`: the time in the manifest of the
    checkpoint that this one is to come after, whatever the clock says; `others`: directories of checkpoints that it
    replaces, too, which are removed when it is there. With `behind`, returns what goes on behind training, if anything
    does: see [Note: copies behind training]. `manifests` are told of the one that is written."""
    ranks, started = all_ranks(*modules_in(parts)), time.perf_counter()
    directory, *others = replaced = [path.absolute() for path in (directory, *others)]
    with ExitStack() as rooms:
        still = rooms.enter_context(ExitStack())  # in which nothing is changed
        with together("collecting what is to be saved", ranks):
            still.enter_context(between_steps(parts, whole=True))
            collected = Collected(ranks.rank, ranks.size)
            mine = {name: {"kind": part.kind, **part.collect(collected)} for name, part in parts.items()}
            for tiers in {one for holding in collected.tensors.values() if (one := holding.tiers) is not None}:
                still.enter_context(tiers.stepping())
        values = equal_or_by_rank(ranks, mine)
        runs = divided(ranks, collected.tensors)
        token = ranks.of_first(secrets.token_hex(4), "the name of a checkpoint's files")
        kept = KeptInStore(directory, partial(names.link_name, token, ranks.rank), files)
        settled = rooms.enter_context(ExitStack())
        settled.callback(kept.settle)
        with together(f"preparing {directory.name}", ranks):
            if ranks.rank == 0:
                rooms.enter_context(_prepared(directory, files, token))
        with together(f"keeping what is in the store for {directory.name}", ranks), refusals("saving", directory):
            kept.keep(runs, unwritten_in(parts), replaced)
        what = collected.tensors, collected.same, values, kept
        now, manifests = _time_after(newest), manifests or Manifests()
        begun = _Begun(directory, files, ranks, token, *what, others, started, now, manifests)
        frozen = None if behind is None else _frozen(directory, parts, kept, ranks)
        if behind is None or frozen is None:
            begun.complete(laid_out(kept.others), report)
            return None
        rooms.callback(frozen.release)
        layout = laid_out(frozen.runs)
        settled.close()
        still.close()
        pace = Pace(partial(_moved_by_others, frozen, [tiers.store for tiers in frozen.tiers]), behind.bandwidth)
        behind_training = rooms.pop_all()

    def complete() -> None:
        with behind_training:
            begun.complete(layout, lambda nbytes: (report(nbytes), pace.keep(nbytes)), COPIED_AT_ONCE)

    try:
        return CopyBehind(f"copying a checkpoint to {directory} behind training", complete, pace)
    except BaseException:
        behind_training.close()
        raise


@dataclass(frozen=True)
class _Begun:
    """A save whose directory is prepared, and for which all that is in stores is kept as it is.

    Attributes:
        tensors, same: as they were collected; `values`: of all parts.
        started: by `time.perf_counter`; `time`: in the manifest; `manifests` are told of it.
    """

    directory: Path
    files: Files
    ranks: Ranks
    token: str
    tensors: Mapping[str, Holding]
    same: dict[str, str]
    values: dict[str, Any]
    kept: KeptInStore
    others: Sequence[Path]
    started: float
    time: str
    manifests: Manifests

    def complete(self, layout: Layout, report: Report, in_flight: int = IN_FLIGHT) -> None:
        """Copy what is laid out, and commit."""
        directory, ranks, files = self.directory, self.ranks, self.files
        paths = [directory / names.data_name(self.token, ranks.rank, number) for number in range(len(layout.sizes))]
        with refusals(f"saving a checkpoint of {in_words(sum(layout.sizes))}", directory):
            sums = _written(ranks, directory, layout, paths, files, report, in_flight)
        report(self.kept.nbytes)
        self._commit(layout, sums, paths)

    @no_search_for_cycles()
    def _commit(self, layout: Layout, sums: Sequence[int], paths: Sequence[Path]) -> None:
        """The same, of what is copied: its checksums, by places, and its files."""
        directory, ranks, files = self.directory, self.ranks, self.files
        found = ranks.of_all(self._parts_saved(layout, sums, paths), "what each rank saved")
        manifest = _manifest(found, self.values, self.time)
        with together(f"committing the checkpoint in {directory.name}", ranks):
            if ranks.rank == 0:
                check_sound(manifest, "the checkpoint to write")
                text = to_text(manifest)
                with refusals("committing a checkpoint", directory):
                    proven = proven_in(directory)
                    names.commit(files, directory, text)
                    self.manifests.add(directory, manifest)
                    _remove(files, names.leftovers(directory, text, proven))
                discard_all(self.others)
        seconds = time.perf_counter() - self.started
        size, how = in_words(manifest.nbytes), _in_words(self.kept, manifest)
        log.info("checkpoint of %s saved to %s in %.1f s%s", size, directory, seconds, how)

    def _parts_saved(
        self, layout: Layout, sums: Sequence[int], paths: Sequence[Path]
    ) -> tuple[list[SavedTensor], dict[str, str], list[SavedFile]]:
        """What this rank has saved: its pieces, the other names of tensors, and its files."""
        pieces: dict[str, list[SavedPiece]] = {}
        for name, piece in self.kept.pieces:
            pieces.setdefault(name, []).append(piece)
        for place, crc in zip(layout.places, sums, strict=True):
            number = len(self.kept.files) + place.file
            piece = SavedPiece(place.elements.start, len(place.elements), number, place.offset, crc)
            pieces.setdefault(place.run.name, []).append(piece)
        tensors = []
        for name, holding in self.tensors.items():
            box = SavedBox(holding.box.offsets, holding.box.shape, tuple(pieces.get(name, ())))
            tensors.append(SavedTensor(name, holding.dtype, holding.shape, (box,)))
        files = [SavedFile(path.name, nbytes) for path, nbytes in zip(paths, layout.sizes, strict=True)]
        return tensors, self.same, self.kept.files + files


def _frozen(directory: Path, parts: Parts, kept: KeptInStore, ranks: Ranks) -> Frozen | None:
    """What is to be copied, kept as it is for that long. None where nothing has to be, but for what is in memory, or
    it can't be kept."""
    if ranks.size > 1 or kept.why_copied is None or kept.pieces:
        return None
    try:
        return Frozen(kept.others, unwritten_in(parts), LARGEST)
    except NotFrozenError as error:
        log.info("the checkpoint in %s is copied while training waits: %s", directory, error)
        return None


def _moved_by_others(frozen: Frozen, stores: Sequence[Store]) -> int:
    """Bytes that stores have moved so far, but for the copies of what is frozen."""
    counters = [store.counters() for store in stores]
    return sum(one.bytes_read + one.bytes_written for one in counters) - frozen.bytes_read


def _in_words(kept: KeptInStore, manifest: Manifest) -> str:
    """How it was saved, if there was a choice."""
    if kept.why_copied is not None:
        return f", by copying: {kept.why_copied}"
    if not manifest.in_store_nbytes:
        return ""
    copied = manifest.nbytes - manifest.in_store_nbytes
    return f", by generations: {in_words(copied)} copied, the others stay in the store's files"


@contextmanager
def _prepared(directory: Path, files: Files, token: str) -> Iterator[None]:
    """A block in which the directory is this process's to save to, without what is left of other saves. Where the block
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
    """Write this rank's data files. Returns the checksums of its pieces. All names are on the device then."""
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
        known = place.run.holding.checksum(place.elements)
        sums.append(crc32c_at(elements.data_ptr(), place.nbytes) if known is None else known)
        if elements.data_ptr() % PAGE or place.nbytes % PAGE:
            elements = _in_pages(elements)
        return files.start_write(handles[place.file], elements.data_ptr(), place.offset, blocks(place.nbytes), elements)

    places = (Transfer(place.nbytes, partial(place.run.holding.read, place.elements), place) for place in layout.places)
    copy(places, write, report, in_flight)
    return sums


def _in_pages(elements: torch.Tensor) -> torch.Tensor:
    """A copy in whole pages, with zeros behind the bytes."""
    pages = aligned_empty(elements.nbytes)
    pages[: elements.nbytes] = elements.contiguous().view(torch.uint8)
    pages[elements.nbytes :] = 0
    return pages


def _manifest(
    found: Sequence[tuple[list[SavedTensor], dict[str, str], list[SavedFile]]], values: dict[str, Any], time: str
) -> Manifest:
    """That of a checkpoint, from what each rank saved."""
    tensors: list[SavedTensor] = []
    same: dict[str, str] = {}
    files: list[SavedFile] = []
    for parts, others, its_files in found:
        tensors += (_moved(part, len(files)) for part in parts) if files else parts
        same |= others
        files += its_files
    return Manifest(
        made_by=f"zinf_fx {version('zinf-fx')}, torch {torch.__version__}",
        time=time,
        ranks=len(found),
        files=tuple(files),
        tensors=merged(tensors),
        same=tuple(same.items()),
        values=values,
    )


def _time_after(newest: str | None) -> str:
    """Now, or the second after `newest` where the clock was set back: checkpoints have the order of their times."""
    now = datetime.now(UTC)
    if newest is not None:
        now = max(now, datetime.fromisoformat(newest) + timedelta(seconds=1))
    return now.isoformat(timespec="seconds")


def _moved(tensor: SavedTensor, first: int) -> SavedTensor:
    """The same, when files are counted from `first` on."""
    boxes = (
        replace(box, pieces=tuple(replace(piece, file=piece.file + first) for piece in box.pieces))
        for box in tensor.boxes
    )
    return replace(tensor, boxes=tuple(boxes))


def _remove(files: Files, paths: Sequence[Path]) -> None:
    """Remove files that are no part of a checkpoint; what stays is removed by the next save."""
    for path in paths:
        try:
            files.remove(path)
        except OSError as error:
            log.warning("%s can't be removed (%s), and is removed by the next save", path, error)


LARGEST_FILE = 4 << 30
"""Bytes of a data file, about: what is behind that goes to another one."""


LARGEST_PIECE = 8 << 20
"""Bytes of a piece that is copied, at most: several are under way at a time."""


_Piece = tuple[SavedRun, range, int]
"""Some elements of a run, and the bytes before them in their file, but for its header."""


@dataclass(frozen=True)
class Layout:
    """Which elements are where in which file, and how the files begin and how long they are."""

    places: tuple[PlaceInFile, ...]
    headers: tuple[bytes, ...]
    sizes: tuple[int, ...]


def laid_out(runs: Iterable[SavedRun], largest: int = LARGEST_FILE) -> Layout:
    """A layout of runs, in their order, in files of about `largest` bytes at most."""
    files: list[list[list[_Piece]]] = []  # of each, pieces in a row of the same run
    filled = largest
    for run in runs:
        row, itemsize = None, run.holding.dtype.itemsize
        for elements in run.holding.chunks(run.elements, LARGEST_PIECE):
            nbytes = blocks(len(elements) * itemsize)
            if filled + nbytes > largest:
                files.append([])
                filled, row = 0, None
            if row is None:
                row = []
                files[-1].append(row)
            row.append((run, elements, filled))
            filled += nbytes
    headers = [_header(entries) for entries in files]
    places = [
        PlaceInFile(run, elements, number, len(headers[number]) + offset)
        for number, rows in enumerate(files)
        for row in rows
        for run, elements, offset in row
    ]
    ends = {one.file: blocks(one.offset + one.nbytes) for one in places}
    return Layout(tuple(places), tuple(headers), tuple(ends[number] for number in range(len(files))))


def _header(entries: Sequence[Sequence[_Piece]]) -> bytes:
    """How a safetensors file begins, in whole pages. `entries`: its tensors, each as pieces in a row."""
    described: dict[str, dict] = {}
    for row in entries:
        (run, first, begin), (_, last, offset) = row[0], row[-1]
        holding, elements = run.holding, range(first.start, last.stop)
        end = offset + len(last) * holding.dtype.itemsize
        shape = list(holding.box.shape) if len(elements) == holding.box.numel else [len(elements)]
        dtype = name_of(holding.dtype)
        if dtype is None:
            dtype, shape = "U8", [end - begin]
        name = run.name + _suffix(holding, elements)
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        if (padded := blocks(end)) > end:
            described[f"padding at {end}"] = {"dtype": "U8", "shape": [padded - end], "data_offsets": [end, padded]}
    return beginning(described, PAGE)


def _suffix(holding: Holding, elements: range) -> str:
    """What tells a part of a tensor from others."""
    corner = "" if holding.box == Box.whole(holding.shape) else f" from {list(holding.box.offsets)}"
    part = "" if len(elements) == holding.box.numel else f", elements {elements.start} to {elements.stop}"
    return corner + part


_WHAT = "what each rank has to save"

Key = tuple[str, tuple[int, ...], tuple[int, ...], int, int]
"""A tensor's name, its box's offsets and shape, and the first element and the one behind the last."""


def divided(ranks: Ranks, tensors: Mapping[str, Holding]) -> list[SavedRun]:
    """The elements that this rank is to save, of those that it has.

    Of what several ranks have, stored tensors go to the one that has least to save so far, and ordinary ones, which may
    differ, to the first.
    """
    runs = [SavedRun(name, holding, elements) for name, holding in tensors.items() for elements in holding.own]
    if ranks.size == 1:
        return runs
    mine = {_key(run): run for run in runs}
    offers = ranks.of_all([(key, run.nbytes, run.holding.is_ordinary) for key, run in mine.items()], _WHAT)
    having: dict[Key, list[int]] = {}
    described: dict[Key, tuple[int, bool]] = {}
    for rank, found in enumerate(offers):
        for key, nbytes, is_ordinary in found:
            having.setdefault(key, []).append(rank)
            described[key] = nbytes, is_ordinary
    loads = [0] * ranks.size
    taken: list[Key] = []
    for key, several in having.items():
        nbytes, is_ordinary = described[key]
        saver = several[0] if is_ordinary else min(several, key=loads.__getitem__)
        loads[saver] += nbytes
        if saver == ranks.rank:
            taken.append(key)
    return [mine[key] for key in taken]


def merged(parts: Iterable[SavedTensor]) -> tuple[SavedTensor, ...]:
    """The tensors of which ranks saved these parts."""
    boxes: dict[str, dict[tuple, list]] = {}
    described: dict[str, SavedTensor] = {}
    for part in parts:
        described.setdefault(part.name, part)
        for box in part.boxes:
            boxes.setdefault(part.name, {}).setdefault(box.box, []).extend(box.pieces)
    return tuple(
        SavedTensor(name, one.dtype, one.shape, tuple(_in_order(box, found) for box, found in boxes[name].items()))
        for name, one in described.items()
    )


def equal_or_by_rank(ranks: Ranks, values: dict[str, Any]) -> dict[str, Any]:
    """The plain values of each part: once, if all ranks have the same; else those of each."""
    found = ranks.of_all(values, "plain values to save")
    together: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in found for name in each):
        several = [each.get(name) for each in found]
        same = all(one == several[0] for one in several)
        together[name] = several[0] if same else {"kind": _kind(several), "ranks": several}
    return together


def _kind(several: list[Any]) -> str:
    return next(one["kind"] for one in several if one is not None)


def _key(run: SavedRun) -> Key:
    box = run.holding.box
    return run.name, box.offsets, box.shape, run.elements.start, run.elements.stop


def _in_order(box: Any, pieces: list) -> SavedBox:
    return SavedBox(box.offsets, box.shape, tuple(sorted(pieces, key=lambda piece: piece.start)))
