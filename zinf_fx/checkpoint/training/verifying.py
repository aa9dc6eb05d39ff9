"""Whether a checkpoint still is what was saved: every byte of it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from zinf_fx.checkpoint.training.loading import check_file
from zinf_fx.checkpoint.training.manifest import Manifest
from zinf_fx.checkpoint.training.open_files import opened
from zinf_fx.checkpoint.training.reading import IN_FLIGHT, Reading
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
    under_way: deque[Reading] = deque()

    def end_first() -> None:
        reading = under_way.popleft()
        try:
            reading.wait()
        except (CheckpointError, StoreError) as error:
            damages.append(str(error))
        report(reading.nbytes)

    with opened([directory / manifest.files[number].path for number in usable], writable=False) as handles:
        for tensor, piece in manifest.pieces():
            if piece.file in usable:
                under_way.append(Reading(handles[usable[piece.file]], tensor, piece))
            while len(under_way) > 1 and sum(reading.nbytes for reading in under_way) > IN_FLIGHT:
                end_first()
        while under_way:
            end_first()
    return damages
