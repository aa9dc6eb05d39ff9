"""Loading: what a checkpoint has is matched with what is to have it, and then read, by each rank what it holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.arguments import check_path
from zinf_fx.checkpoint.copying import TensorShard, fill, read_pieces
from zinf_fx.checkpoint.entries import (
    LOADED_IN_PART,
    OPTIMIZER,
    EntrySnapshot,
    Matching,
    RandomEntry,
    StateEntries,
    ValueEntry,
    between_steps,
    listed,
    modules_in,
    state_entries,
    streamed_in,
    unwritten_in,
)
from zinf_fx.checkpoint.files import opened
from zinf_fx.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    SavedTensor,
    check_file,
    check_files,
    from_text,
    read_manifest,
)
from zinf_fx.checkpoint.models import all_ranks, together
from zinf_fx.checkpoint.sharing import ZeroCopyLoad
from zinf_fx.checkpoint.values import decode
from zinf_fx.errors import CheckpointError, StoreError, UnfitValueError
from zinf_fx.interrupts import held_back
from zinf_fx.runtime.ranks import Ranks

Report = Callable[[int], object]


def load_checkpoint(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizer | None = None, **extra: object
) -> dict[str, Any]:
    """Load what `save_checkpoint` saved into a model, an optimizer and `extra`, in place; returns the plain values.

    What is to have it is built as for a new training: with any number of ranks, in any placement, with any tiles and
    packs. What was saved and is to be left out is given as None. No more than some chunks are in memory at a time.

    Raises: CheckpointError for a directory without a whole checkpoint, and for one that doesn't fit, naming the first
    differences, before anything is changed. When a checksum is wrong, or a read fails, some is changed: the error says
    so, and an optimizer of `zinf_fx.optim` refuses to step until a checkpoint was loaded.
    """
    left_out = [name for name, owner in extra.items() if owner is None] + ([OPTIMIZER] if optimizer is None else [])
    given = {name: owner for name, owner in extra.items() if owner is not None}
    check_path(directory, "load_checkpoint")
    return load(Path(directory), state_entries(model, optimizer, given), left_out)


@held_back
def load(
    directory: Path, entries: StateEntries, left_out: list[str], report: Report = lambda nbytes: None
) -> dict[str, Any]:
    """Load as `load_checkpoint` does. `report` is told of bytes that are where they belong."""
    ranks, directory = all_ranks(*modules_in(entries)), directory.absolute()
    with together(f"looking at the checkpoint in {directory.name}", ranks):
        content = read_manifest(directory)
        manifest = from_text(content, str(directory / MANIFEST))
        check_files(directory, manifest)
    _check_same(ranks, directory, f"that of {manifest.time}, {hashlib.sha256(content).hexdigest()[:16]}")
    with ExitStack() as rooms:
        with together(f"matching the checkpoint in {directory.name} with what is to be loaded", ranks):
            rooms.enter_context(between_steps(entries, whole=False))
            matching = Matching(manifest.by_name(), left_out, ranks.rank, ranks.size, manifest.ranks)
            plain = _match(manifest, entries, left_out, matching)
        wanted = set().union(*ranks.of_all(matching.wanted, "which tensors are to be loaded"))
        with together(f"loading the checkpoint in {directory.name}", ranks):
            if differences := matching.all_differences(wanted):
                raise CheckpointError(
                    f"the checkpoint in {directory} doesn't fit what is to be loaded: {listed(differences)}; nothing "
                    "was changed: build the model, its optimizer and what else there was as they were when it was saved"
                )
        with together(f"loading the checkpoint in {directory.name}", ranks):
            for optimizer in streamed_in(entries):
                optimizer.torn = LOADED_IN_PART
            try:
                _read(directory, manifest, matching, unwritten_in(entries), report)
            except BaseException as error:
                error.add_note("some of the model is loaded, and some is not: load a whole checkpoint before training")
                raise
        for optimizer in streamed_in(entries):
            optimizer.torn = None
    return plain


def _check_same(ranks: Ranks, directory: Path, mine: str) -> None:
    """Raises: CheckpointError, on all ranks, when they have different checkpoints before them. `mine`: this one's."""
    of_ranks = ranks.of_all(mine, "which checkpoint is loaded")
    if len(set(of_ranks)) > 1:
        by_rank = "; ".join(f"rank {rank}: {checkpoint}" for rank, checkpoint in enumerate(of_ranks))
        raise CheckpointError(
            f"loading {directory} was refused: ranks have different checkpoints there ({by_rank}); give a directory "
            "that is the same for all of them, and let none save to it meanwhile"
        )


def _match(manifest: Manifest, entries: StateEntries, left_out: list[str], matching: Matching) -> dict[str, Any]:
    """Match all entries. Returns the plain values."""
    plain: dict[str, Any] = {}
    for name, saved in manifest.values.items():
        if name in left_out:
            continue
        values = _of_rank(name, saved, matching)
        entry = entries.get(name)
        if values is None:
            continue
        if saved["kind"] == ValueEntry.kind and (entry is None or entry.kind == ValueEntry.kind):
            plain[name] = decode(values["value"], matching.in_memory)
        elif entry is None:
            matching.differences.append(f"'{name}' is in the checkpoint alone: give it, or {name}=None to leave it out")
        elif entry.kind != saved["kind"]:
            matching.differences.append(f"'{name}' is a {entry.kind}, and a {saved['kind']} in the checkpoint")
        else:
            assert not isinstance(entry, (ValueEntry, EntrySnapshot))
            with unfit_values(f"'{name}'"):
                entry.match(values, matching)
    for name in entries:
        if name not in manifest.values:
            matching.differences.append(f"'{name}' is not in the checkpoint")
    return plain


@contextmanager
def unfit_values(what: str) -> Iterator[None]:
    """Open a block that takes plain values of a checkpoint: what fails at them is raised as an UnfitValueError."""
    try:
        yield
    except (CheckpointError, StoreError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UnfitValueError(f"{what} of the checkpoint can't be taken: {reason}; use another checkpoint") from error


def _of_rank(name: str, saved: Mapping[str, Any], matching: Matching) -> Mapping[str, Any] | None:
    """Return the values of an entry that are this rank's; None: none are."""
    if "ranks" not in saved:
        return saved
    if matching.ranks != matching.ranks_then and saved["kind"] != RandomEntry.kind:
        matching.differences.append(
            f"'{name}' was another one on each of {matching.ranks_then} ranks, and {matching.ranks} are here: load "
            f"with as many, or give {name}=None to leave it out"
        )
        return None
    return saved["ranks"][matching.rank] if matching.rank < len(saved["ranks"]) else None


def _read(directory: Path, manifest: Manifest, matching: Matching, unwritten: Set[int], report: Report) -> None:
    """Read all that was matched; `unwritten`: keys of the storages that no step rewrites. Raises: CheckpointError,
    StoreError, and what loading a state raises."""
    with unfit_values("what is set before tensors are read"):
        for change in matching.begin:
            change()
    stores = {tiers for _, shard in matching.targets if (tiers := shard.tiers) is not None}
    with ExitStack() as rooms:
        for tiers in stores:
            rooms.enter_context(tiers.stepping())
        handles = rooms.enter_context(opened([directory / file.path for file in manifest.files]))
        shared = ZeroCopyLoad(directory, manifest, matching)
        shared.complete(handles, unwritten, report)
        fill(sorted(shared.others, key=_first_place), handles, report)
    for tiers in stores:
        tiers.drain()
    for _, shard in matching.targets:
        shard.mark_loaded()
    with unfit_values("what is set behind the tensors"):
        for change in matching.end:
            change()


def _first_place(target: tuple[SavedTensor, TensorShard]) -> tuple[int, int]:
    return min(((piece.file, piece.offset) for shard in target[0].boxes for piece in shard.pieces), default=(0, 0))


def damages_of(directory: Path, manifest: Manifest, report: Callable[[int], object]) -> list[str]:
    """Say what of a checkpoint is not as it was saved. `report` is told of bytes that were read."""
    damages: list[str] = []
    usable: dict[int, int] = {}  # of each file that is there, its number among those
    for number, file in enumerate(manifest.files):
        try:
            check_file(directory, file)
        except CheckpointError as error:
            damages.append(str(error))
        else:
            usable[number] = len(usable)
    pieces = (
        (tensor, replace(piece, file=usable[piece.file]), None)
        for tensor, piece in manifest.pieces()
        if piece.file in usable
    )
    with opened([directory / manifest.files[number].path for number in usable]) as handles:
        for reading, _ in read_pieces(handles, pieces):
            try:
                reading.wait()
            except (CheckpointError, StoreError) as error:
                damages.append(str(error))
            report(reading.nbytes)
    return damages
