"""What nobody needs any more of data files of stores that jobs have left in checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from zinf_fx.checkpoint.training.catalog import Found
from zinf_fx.runtime.disk.filesystem import taken_by
from zinf_fx.runtime.disk.links import abandoned, give_back_all_but
from zinf_fx.runtime.disk.ownership import is_alike, is_proven
from zinf_fx.sizes import PAGE

log = logging.getLogger("zinf_fx")


def give_back_unnamed(found: Iterable[Found]) -> dict[Path, int]:
    """Give back to the file system what is in no checkpoint, of each store's file whose names are all among these
    checkpoints, and whose job is over. Returns how many bytes, by one name of each file of which there were any.

    What manifests say of a file is not enough: it has to prove that it is a store's, see [Note: proofs].
    """
    by_file: dict[tuple[int, int], list[tuple[Found, str]]] = {}
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
                by_file.setdefault((info.st_dev, info.st_ino), []).append((one, file.path))
    given = {links[0][0].path / links[0][1]: _give_back(links) for links in by_file.values()}
    return {path: nbytes for path, nbytes in given.items() if nbytes}


def _give_back(links: list[tuple[Found, str]]) -> int:
    """The same, of one file by all of its names that are known."""
    (first, name), *_ = links
    with abandoned(first.path, name) as file:
        if file is None:
            return 0
        fd, info = file
        if info.st_nlink > len(links):
            return 0
        content = [part for one, path in links for part in one.manifest.content_of(path)]
        if taken_by(info) <= sum(map(len, content)) + 2 * PAGE:  # its first page, and what the file system takes
            return 0
        if not is_proven(fd) and not (is_alike(fd) and all(one.manifest.is_in(fd, path) for one, path in links)):
            log.warning(
                "%s has bytes that are in no checkpoint, and they stay: it doesn't prove to be a store's data file; "
                "remove what you don't need by hand",
                first.path / name,
            )
            return 0
        give_back_all_but(fd, content)
        os.fsync(fd)
        return taken_by(info) - taken_by(os.fstat(fd))
