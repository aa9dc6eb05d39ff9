"""Files that appear in a directory when they are whole, so that a crash leaves what was there before or all of the new.

They are written in a folder within the directory, and renamed from there: their bytes are on the disk before their
names, and a name before the next. A folder that a killed job left is emptied by whoever writes next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from zinf_fx.checkpoint.files import LOCK, Files, locked, make_directory, refusals, sync
from zinf_fx.errors import CheckpointError
from zinf_fx.regular_files import check_regular

_FOLDER = ".zinf-unfinished"


@contextmanager
def unfinished(directory: Path, files: Files) -> Iterator[Path]:
    """A folder for new files in `directory`, which is made where it is missing. What was not renamed from there by the
    end of the block is removed.

    Raises: CheckpointError where somebody else writes there, or nobody can.
    """
    folder = directory / _FOLDER
    with refusals("making a folder for new files", folder):
        make_directory(files, folder)
        if folder.is_symlink():
            raise CheckpointError(
                f"making a folder for new files was refused: {folder} is a link to another place, whose files would be "
                "removed; remove the link"
            )
    _check_is_left(folder)
    with locked(folder):
        _empty(folder, files)
        try:
            yield folder
        finally:
            _empty(folder, files)
            files.remove(folder / LOCK)
            with contextlib.suppress(OSError):  # somebody else is about to write there
                folder.rmdir()


def appear(renamed: Mapping[Path, Path], files: Files) -> None:
    """Rename whole files, each to what it maps to, all in one directory. When this returns, a power failure can't undo
    it. Raises: OSError."""
    for path in renamed:
        sync(files, path)
    for old, new in renamed.items():
        files.rename(old, new)
    for directory in {new.parent for new in renamed.values()}:
        sync(files, directory)


def _check_is_left(folder: Path) -> None:
    """Raises: CheckpointError for files in a folder that nobody who writes made: it would have a lock."""
    with refusals("removing what is left of an export", folder):
        names = sorted(os.listdir(folder))
    if not names or LOCK in names:
        return
    left = folder / names[0]
    with refusals("removing what is left of an export", left):
        check_regular(os.lstat(left), left)
    raise CheckpointError(
        f"removing what is left of an export was refused: {left} is in a folder without a '{LOCK}', which no export "
        "made; move it elsewhere"
    )


def _empty(folder: Path, files: Files) -> None:
    for left in folder.iterdir():
        if left.name != LOCK:
            with refusals("removing what is left of an export", left):
                files.remove(left)
