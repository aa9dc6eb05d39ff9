"""The checkpoints in a directory: one, or several in directories of their own; which are removed, and their garbage."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from zinf_fx.checkpoint.files import FILES, LOCK, locked, refusals, sync
from zinf_fx.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    begins_manifest,
    check_files,
    is_data,
    is_link,
    is_ours,
    leftovers,
    manifest_in,
    manifest_of,
)
from zinf_fx.errors import CheckpointError
from zinf_fx.regular_files import open_regular
from zinf_fx.runtime.disk.filesystem import taken_by
from zinf_fx.runtime.disk.links import abandoned, give_back_all_but
from zinf_fx.runtime.disk.ownership import is_alike, is_proven
from zinf_fx.sizes import PAGE

log = logging.getLogger("zinf_fx")

STEP = "step"
"""Under which name the number of a checkpoint's step is saved."""

_NUMBERED = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class CheckpointDirectory:
    """A directory with a checkpoint, or with what is left of one. `damage` says why it can't be loaded, if known."""

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
    """Return the directory of a step's checkpoint."""
    return f"step-{step:08d}"


def is_numbered(directory: Path) -> bool:
    """Whether `name_of` may have named it."""
    return _NUMBERED.fullmatch(directory.name) is not None


def checkpoints_in(directory: Path, read: Callable[[Path], Manifest] = manifest_of) -> list[CheckpointDirectory]:
    """Return the checkpoint that a directory is, or those in it, from the oldest to the newest. `read` returns the
    manifest of one. Directories that this user may not read, such as `lost+found`, are left out.

    Raises: CheckpointError for a directory that can't be read, and for one in it that has the number of a step.
    """
    names = _names_in(directory)
    if _looks_like_one(directory, names):
        return [look_at(directory, read)]
    checkpoints = []
    for path in (directory / name for name in names):
        if path.is_dir() and not path.is_symlink() and _may_be_one(path):
            checkpoints.append(look_at(path, read))
    return sorted(checkpoints, key=lambda checkpoint: _age(checkpoint, checkpoints))


def _age(checkpoint: CheckpointDirectory, checkpoints: Sequence[CheckpointDirectory]) -> tuple[str, float]:
    """Return a key that orders checkpoints from the oldest to the newest. One whose manifest can't be read comes behind
    all of smaller steps than its number; without a number, behind all: it may be the newest, which isn't passed over
    in silence."""
    if checkpoint.manifest is not None:
        return checkpoint.manifest.time, checkpoint.step or 0
    if checkpoint.is_left_over:
        return "", 0
    match = _NUMBERED.fullmatch(checkpoint.path.name)
    number = int(match[1]) if match else math.inf
    before = (
        earlier.manifest.time
        for earlier in checkpoints
        if earlier.manifest is not None and (earlier.step or 0) < number
    )
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


def look_at(directory: Path, read: Callable[[Path], Manifest] = manifest_of) -> CheckpointDirectory:
    """Read the directory of a checkpoint."""
    manifest = None
    try:
        manifest = read(directory)
        check_files(directory, manifest)
    except CheckpointError as error:
        return CheckpointDirectory(directory, manifest, str(error))
    return CheckpointDirectory(directory, manifest)


def _looks_like_one(directory: Path, names: list[str]) -> bool:
    """Whether these files of a directory make a checkpoint, or are left of one. Other programs have a manifest.json."""
    if any(is_ours(name) for name in names if name != MANIFEST):
        return True
    manifest = directory / MANIFEST
    with refusals("looking for checkpoints", manifest):
        return manifest.is_file() and begins_manifest(manifest)


def discard(directory: Path, proven: Collection[Path] = ()) -> None:
    """Remove a checkpoint, or what is left of a save: first what makes it one. What is not ours in the directory stays.
    `proven`: files that are known to be what their names say.

    Raises: CheckpointError when another process saves to it, when the manifest names a file that isn't what its name
    says, or it can't be removed.
    """
    if directory.is_symlink():
        raise CheckpointError(f"removing a checkpoint was refused: {directory} is a link to another place")
    with refusals("removing a checkpoint", directory):
        names = set(os.listdir(directory)) - {LOCK}
    if names and MANIFEST not in names and not leftovers(directory, b""):
        return
    with refusals("removing a checkpoint", directory), locked(directory):
        manifest, mine = manifest_in(directory), leftovers(directory, b"", proven)
        named = sorted(name for name in names if is_data(name) and name.encode() in manifest)
        if foreign := [name for name in named if directory / name not in mine]:
            raise CheckpointError(
                f"removing the checkpoint in {directory} was refused: {foreign[0]} has the name of a data file, and "
                "doesn't prove to be one of this user's; remove it by hand"
            )
        FILES.remove(directory / MANIFEST)
        sync(FILES, directory)
        for path in mine:
            FILES.remove(path)
        if not os.stat(directory / LOCK, follow_symlinks=False).st_size:  # else it was somebody's before
            FILES.remove(directory / LOCK)
        if not os.listdir(directory):
            os.rmdir(directory)


def proven_in(directory: Path) -> set[Path]:
    """Return the files of stores in a checkpoint that earlier versions made, and that have what its manifest says: see
    [Note: proofs]. Where there are none of that form, the manifest isn't read."""
    with refusals("looking for data files", directory):
        paths = [directory / name for name in sorted(os.listdir(directory)) if is_data(name) and is_link(name)]
    with ExitStack() as opened:
        alike = {path: fd for path in paths if (fd := _opened(path, opened)) is not None and is_alike(fd)}
        if all(map(is_proven, alike.values())):
            return set()
        try:
            manifest = manifest_of(directory)
        except CheckpointError:
            return set()
        names = {file.path for file in manifest.files}
        return {path for path, fd in alike.items() if path.name in names and manifest.is_in(fd, path.name)}


def _opened(path: Path, opened: ExitStack) -> int | None:
    """Return a descriptor of a file; None for what can't be opened, and for links."""
    try:
        fd = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    opened.callback(os.close, fd)
    return fd


def discard_all(directories: Iterable[Path]) -> None:
    """Discard checkpoints; where one can't be removed, a warning says so."""
    for directory in directories:
        try:
            discard(directory, proven_in(directory))
        except CheckpointError as error:
            log.warning("an old checkpoint stays: %s", error)


def give_back_unnamed(checkpoints: Iterable[CheckpointDirectory]) -> dict[Path, int]:
    """Free what is in no checkpoint of each store's file whose names are all among these checkpoints, and whose job is
    over. Returns how many bytes were freed, by one name of each file of which there were any.

    What manifests say of a file is not enough: it has to prove that it is a store's, see [Note: proofs].
    """
    by_file: dict[tuple[int, int], list[tuple[Path, Manifest, str]]] = {}
    directories: set[tuple[int, int]] = set()
    for checkpoint in checkpoints:
        info = checkpoint.path.stat()
        if checkpoint.manifest is None or (info.st_dev, info.st_ino) in directories:
            continue
        directories.add((info.st_dev, info.st_ino))
        for file in checkpoint.manifest.files:
            path = checkpoint.path / file.path
            if file.of_store and path.exists():
                info = path.stat(follow_symlinks=False)
                by_file.setdefault((info.st_dev, info.st_ino), []).append(
                    (checkpoint.path, checkpoint.manifest, file.path)
                )
    given = {links[0][0] / links[0][2]: _give_back(links) for links in by_file.values()}
    return {path: nbytes for path, nbytes in given.items() if nbytes}


def _give_back(links: list[tuple[Path, Manifest, str]]) -> int:
    """Free what is in no checkpoint of one file. `links`: all of its names that are known."""
    (first, _, name), *_ = links
    with abandoned(first, name) as file:
        if file is None:
            return 0
        fd, info = file
        if info.st_nlink > len(links):
            return 0
        content = [part for _, manifest, path in links for part in manifest.content_of(path)]
        if taken_by(info) <= sum(map(len, content)) + 2 * PAGE:  # its first page, and what the file system takes
            return 0
        is_named = is_alike(fd) and all(manifest.is_in(fd, path) for _, manifest, path in links)
        if not is_proven(fd) and not is_named:
            log.warning(
                "%s has bytes that are in no checkpoint, and they stay: it doesn't prove to be a store's data file; "
                "remove what you don't need by hand",
                first / name,
            )
            return 0
        give_back_all_but(fd, content)
        os.fsync(fd)
        return taken_by(info) - taken_by(os.fstat(fd))
