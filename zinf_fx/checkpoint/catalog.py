"""The checkpoints in a directory: one, or several in directories of their own."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zinf_fx.checkpoint.files import refusals
from zinf_fx.checkpoint.manifest import MANIFEST, Manifest, begins_manifest, check_files, is_ours, manifest_of
from zinf_fx.errors import CheckpointError

log = logging.getLogger("zinf_fx")

STEP = "step"
"""Under which name the number of a checkpoint's step is saved."""

_NUMBERED = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Found:
    """A directory with a checkpoint, or with what is left of one: why it can't be loaded, as far as that shows."""

    path: Path
    manifest: Manifest | None
    damage: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all files are there, as long as they were."""
        return self.damage is None

    @property
    def is_left_over(self) -> bool:
        """Whether a save was cut off here before there was a checkpoint."""
        return not os.path.lexists(self.path / MANIFEST)

    @property
    def step(self) -> int | None:
        """The number of its step, if that was saved."""
        value = self.manifest.values.get(STEP, {}).get("value") if self.manifest is not None else None
        return value if type(value) is int and value >= 0 else None

    @property
    def is_numbered(self) -> bool:
        """Whether its directory has a number and not a name, so that newer ones replace it."""
        return is_numbered(self.path)


def name_of(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"step-{step:08d}"


def is_numbered(directory: Path) -> bool:
    """Whether `name_of` may have named it."""
    return _NUMBERED.fullmatch(directory.name) is not None


def checkpoints_in(directory: Path, read: Callable[[Path], Manifest] = manifest_of) -> list[Found]:
    """That which a directory is, or those in the directories in it, from the oldest to the newest. `read`: gives the
    manifest of one. Directories that this user may not read, such as `lost+found`, are left out.

    Raises: CheckpointError for a directory that can't be read, and for one in it that has the number of a step.
    """
    names = _names_in(directory)
    if _looks_like_one(directory, names):
        return [look_at(directory, read)]
    found = []
    for path in (directory / name for name in names):
        if path.is_dir() and not path.is_symlink() and _may_be_one(path):
            found.append(look_at(path, read))
    return sorted(found, key=lambda one: _age(one, found))


def _age(one: Found, others: Sequence[Found]) -> tuple[str, float]:
    """What orders checkpoints from the oldest to the newest. One whose manifest can't be read comes behind all of
    smaller steps than its number; without a number, behind all: it may be the newest, which isn't passed over in
    silence."""
    if one.manifest is not None:
        return one.manifest.time, one.step or 0
    if one.is_left_over:
        return "", 0
    number = int(found[1]) if (found := _NUMBERED.fullmatch(one.path.name)) else math.inf
    before = (other.manifest.time for other in others if other.manifest is not None and (other.step or 0) < number)
    return max(before, default=""), number


def _names_in(directory: Path) -> list[str]:
    with refusals("looking for checkpoints", directory):
        os.stat(os.path.join(directory, "."))  # what may be listed may not be looked at for that
        return sorted(os.listdir(directory))


def _may_be_one(directory: Path) -> bool:
    """Whether there is a checkpoint in a directory, or its number says that there may have been one. There is none in
    what this user may not read. Raises: CheckpointError for a directory with a number that can't be read."""
    try:
        return _looks_like_one(directory, _names_in(directory)) or is_numbered(directory)
    except CheckpointError as error:
        if is_numbered(directory) or not isinstance(error.__cause__, PermissionError):
            raise
        return False


def look_at(directory: Path, read: Callable[[Path], Manifest] = manifest_of) -> Found:
    """What is in the directory of a checkpoint."""
    manifest = None
    try:
        manifest = read(directory)
        check_files(directory, manifest)
    except CheckpointError as error:
        return Found(directory, manifest, str(error))
    return Found(directory, manifest)


def _looks_like_one(directory: Path, names: list[str]) -> bool:
    """Whether these files of a directory make a checkpoint, or are left of one. Other programs have a manifest.json."""
    if any(is_ours(name) for name in names if name != MANIFEST):
        return True
    manifest = directory / MANIFEST
    with refusals("looking for checkpoints", manifest):
        return manifest.is_file() and begins_manifest(manifest)
