"""Removing checkpoints, and what nobody needs any more of data files of stores that jobs have left in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path

from zinf_fx.checkpoint.catalog import Found
from zinf_fx.checkpoint.files import FILES, LOCK, locked, refusals, sync
from zinf_fx.checkpoint.manifest import MANIFEST, Manifest, is_data, is_link, leftovers, manifest_in, manifest_of
from zinf_fx.errors import CheckpointError
from zinf_fx.regular_files import open_regular
from zinf_fx.runtime.disk.filesystem import taken_by
from zinf_fx.runtime.disk.links import abandoned, give_back_all_but
from zinf_fx.runtime.disk.ownership import is_alike, is_proven
from zinf_fx.sizes import PAGE


def discard(directory: Path, proven: Collection[Path] = ()) -> None:
    """Remove a checkpoint, or what is left of a save: first what makes it one. What is not ours in the directory stays.
    `proven`: as of `leftovers`.

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
    """The files of stores in a checkpoint that earlier versions made, and that have what its manifest says: see
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
    """A descriptor of a file that is there; None of what can't be opened, and of links."""
    try:
        fd = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    opened.callback(os.close, fd)
    return fd


def discard_all(directories: Iterable[Path]) -> None:
    """As `discard`, of several; where one can't be removed, a warning says so."""
    for directory in directories:
        try:
            discard(directory, proven_in(directory))
        except CheckpointError as error:
            log.warning("an old checkpoint stays: %s", error)


log = logging.getLogger("zinf_fx")


def give_back_unnamed(found: Iterable[Found]) -> dict[Path, int]:
    """Give back to the file system what is in no checkpoint, of each store's file whose names are all among these
    checkpoints, and whose job is over. Returns how many bytes, by one name of each file of which there were any.

    What manifests say of a file is not enough: it has to prove that it is a store's, see [Note: proofs].
    """
    by_file: dict[tuple[int, int], list[tuple[Path, Manifest, str]]] = {}
    directories: set[tuple[int, int]] = set()
    for one in found:
        its = one.path.stat()
        if one.manifest is None or (its.st_dev, its.st_ino) in directories:
            continue
        directories.add((its.st_dev, its.st_ino))
        for file in one.manifest.files:
            path = one.path / file.path
            if file.of_store and path.exists():
                info = path.stat(follow_symlinks=False)
                by_file.setdefault((info.st_dev, info.st_ino), []).append((one.path, one.manifest, file.path))
    given = {links[0][0] / links[0][2]: _give_back(links) for links in by_file.values()}
    return {path: nbytes for path, nbytes in given.items() if nbytes}


def _give_back(links: list[tuple[Path, Manifest, str]]) -> int:
    """The same, of one file by all of its names that are known."""
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
        if not is_proven(fd) and not (is_alike(fd) and all(manifest.is_in(fd, path) for _, manifest, path in links)):
            log.warning(
                "%s has bytes that are in no checkpoint, and they stay: it doesn't prove to be a store's data file; "
                "remove what you don't need by hand",
                first / name,
            )
            return 0
        give_back_all_but(fd, content)
        os.fsync(fd)
        return taken_by(info) - taken_by(os.fstat(fd))
