"""Saving: what a training consists of goes to data files, and then the manifest makes it a checkpoint."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.checkpoint.agreement import all_ranks, together
from zinf_fx.checkpoint.files import FILES, Files, locked, make_directory, refusals, sync_directory
from zinf_fx.checkpoint.training import files as names
from zinf_fx.checkpoint.training.contents import Parts, between_steps, parts_of, unwritten_in
from zinf_fx.checkpoint.training.dividing import divided, equal_or_by_rank, merged
from zinf_fx.checkpoint.training.generations import KeptInStore
from zinf_fx.checkpoint.training.layout import Layout, laid_out
from zinf_fx.checkpoint.training.manifest import (
    Manifest,
    Piece,
    SavedBox,
    SavedFile,
    SavedTensor,
    begins_manifest,
    check_sound,
    to_text,
)
from zinf_fx.checkpoint.training.open_files import opened
from zinf_fx.checkpoint.training.parts.part import Collected
from zinf_fx.checkpoint.training.writing import Writer
from zinf_fx.errors import CheckpointError
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.sizes import in_words

log = logging.getLogger("zinf_fx")

Report = Callable[[int], object]


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
    save(Path(directory), parts_of(model, optimizer, extra))


def save(
    directory: Path,
    parts: Parts,
    files: Files = FILES,
    report: Report = lambda nbytes: None,
    newest: str | None = None,
    others: Sequence[Path] = (),
) -> None:
    """As `save_checkpoint`. `report` is told of bytes that were written; `newest`: the time in the manifest of the
    checkpoint that this one is to come after, whatever the clock says; `others`: directories of checkpoints that it
    replaces, too, which are removed when it is there."""
    ranks, started = all_ranks(), time.perf_counter()
    replaced = [path.absolute() for path in (directory, *others)]
    with ExitStack() as rooms:
        with together("collecting what is to be saved", ranks):
            rooms.enter_context(between_steps(parts, whole=True))
            collected = Collected(ranks.rank, ranks.size)
            mine = {name: {"kind": part.kind, **part.collect(collected)} for name, part in parts.items()}
            for tiers in {holding.tiers for holding in collected.tensors.values()} - {None}:
                rooms.enter_context(tiers.stepping())
        values = equal_or_by_rank(ranks, mine)
        runs = divided(ranks, collected.tensors)
        token = ranks.of_first(secrets.token_hex(4), "the name of a checkpoint's files")
        kept = KeptInStore(directory, partial(names.link_name, token, ranks.rank), files)
        rooms.callback(kept.settle)
        with together(f"preparing {directory}", ranks):
            if ranks.rank == 0:
                rooms.enter_context(_prepared(directory, files, token))
        with together(f"keeping what is in the store for {directory}", ranks), refusals("saving", directory):
            kept.keep(runs, unwritten_in(parts), replaced)
        layout = laid_out(kept.others)
        paths = [directory / names.data_name(token, ranks.rank, number) for number in range(len(layout.sizes))]
        with refusals(f"saving a checkpoint of {in_words(sum(layout.sizes))}", directory):
            sums = _written(ranks, directory, layout, paths, files, report)
        report(kept.nbytes)
        found = ranks.of_all(_parts_saved(collected, kept, layout, sums, paths), "what each rank saved")
        manifest = _manifest(found, values, _time_after(newest))
        with together(f"committing the checkpoint in {directory}", ranks):
            if ranks.rank == 0:
                check_sound(manifest, "the checkpoint to write")
                text = to_text(manifest)
                with refusals("committing a checkpoint", directory):
                    names.commit(files, directory, text)
                    _remove(files, names.leftovers(directory, text))
                names.discard_all(others)
    seconds = time.perf_counter() - started
    size, how = in_words(manifest.nbytes), _in_words(kept, manifest)
    log.info("checkpoint of %s saved to %s in %.1f s%s", size, directory, seconds, how)


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
    with refusals("making a directory for a checkpoint", directory):
        make_directory(files, directory)
    with locked(directory):
        before = names.manifest_in(directory)
        if before and not begins_manifest(directory / names.MANIFEST):
            raise CheckpointError(
                f"saving a checkpoint to {directory} was refused: its {names.MANIFEST} is another program's; choose "
                "another directory"
            )
        _remove(files, names.leftovers(directory, before))
        try:
            yield
        except BaseException:
            _remove(files, names.of_failed_save(directory, token))
            raise


def _written(
    ranks: Ranks, directory: Path, layout: Layout, paths: Sequence[Path], files: Files, report: Report
) -> list[int]:
    """Write this rank's data files. Returns the checksums of its pieces. All names are on the device then."""
    with together("reserving space for the checkpoint", ranks):
        for path, nbytes in zip(paths, layout.sizes, strict=True):
            fd = files.create(path)
            try:
                files.reserve(fd, nbytes)
            finally:
                os.close(fd)
    with together("writing the checkpoint", ranks):
        with opened(paths, files) as handles:
            sums = Writer(files, handles, report).write(layout.headers, layout.places)
        sync_directory(files, directory)
    return sums


def _parts_saved(
    collected: Collected, kept: KeptInStore, layout: Layout, sums: Sequence[int], paths: Sequence[Path]
) -> tuple[list[SavedTensor], dict[str, str], list[SavedFile]]:
    """What this rank has saved: its pieces, the other names of tensors, and its files."""
    pieces: dict[str, list[Piece]] = {}
    for place, crc in zip(layout.places, sums, strict=True):
        piece = Piece(place.elements.start, len(place.elements), place.file, place.offset, crc)
        pieces.setdefault(place.run.name, []).append(piece)
    for stored in kept.pieces:
        piece = replace(stored.piece, file=stored.piece.file + len(paths))
        pieces.setdefault(stored.run.name, []).append(piece)
    tensors = []
    for name, holding in collected.tensors.items():
        box = SavedBox(holding.box.offsets, holding.box.shape, tuple(pieces.get(name, ())))
        tensors.append(SavedTensor(name, holding.dtype, holding.shape, (box,)))
    files = [SavedFile(path.name, nbytes) for path, nbytes in zip(paths, layout.sizes, strict=True)]
    return tensors, collected.same, files + kept.files


def _manifest(
    found: Sequence[tuple[list[SavedTensor], dict[str, str], list[SavedFile]]], values: dict[str, Any], time: str
) -> Manifest:
    """That of a checkpoint, from what each rank saved."""
    tensors: list[SavedTensor] = []
    same: dict[str, str] = {}
    files: list[SavedFile] = []
    for parts, others, its_files in found:
        tensors += (_moved(part, len(files)) for part in parts)
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
