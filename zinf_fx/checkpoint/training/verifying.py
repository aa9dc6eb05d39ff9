"""Whether a checkpoint still is what was saved: every byte of it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zinf_fx.checkpoint.training.loading import check_file
from zinf_fx.checkpoint.training.manifest import Manifest
from zinf_fx.checkpoint.training.open_files import opened
from zinf_fx.checkpoint.training.reading import readings
from zinf_fx.errors import CheckpointError, StoreError


def damages_of(directory: Path, manifest: Manifest, report: Callable[[int], object]) -> list[str]:
    """What of a checkpoint is not as it was saved, in words. `report` is told of bytes that were read."""
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
        for reading, _ in readings(handles, pieces):
            try:
                reading.wait()
            except (CheckpointError, StoreError) as error:
                damages.append(str(error))
            report(reading.nbytes)
    return damages
