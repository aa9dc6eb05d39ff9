"""Files that appear in a directory when they are whole, so that a crash leaves what was there before or all of the new.

They are written in a folder within the directory, and renamed from there: their bytes are on the disk before their
names, and a name before the next. A folder that a killed job left is emptied by whoever writes next.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zinf_fx.errors import CheckpointError

_FOLDER = ".zinf-unfinished"

_HINTS = {
    errno.ENOSPC: "free space, or name another directory",
    errno.EDQUOT: "the disk quota is used up: free space, or name another directory",
    errno.EROFS: "the file system is read-only: name another directory",
    errno.EACCES: "this user may not write there: change its mode, or name another directory",
    errno.ENOTDIR: "it is no directory: name one",
    errno.EEXIST: "it is no directory: name one",
}


@contextmanager
def unfinished(directory: Path) -> Iterator[Path]:
    """A folder for new files in `directory`, which is made where it is missing. What was not renamed from there by the
    end of the block is removed.

    Raises: CheckpointError where somebody else writes there, or nobody can.
    """
    folder = directory / _FOLDER
    with refusals(f"write to '{directory}'"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _take(lock, directory)
        for left in folder.iterdir():
            left.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
    finally:
        os.close(lock)


def _take(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another job is writing to '{directory}': wait for it, or name another directory"
        ) from error
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):  # network file systems lock no folders
            raise


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Errors of the operating system in the block are raised as CheckpointErrors, with what to do."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "see what the system says")
        raise CheckpointError(f"could not {what}: {os.strerror(error.errno or 0)}; {hint}") from error


def reserve(path: Path, nbytes: int) -> None:
    """Make a file of so many bytes, for which there is room. Raises: OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if nbytes:
            os.posix_fallocate(file, 0, nbytes)
    finally:
        os.close(file)


def appear(paths: list[Path], directory: Path) -> None:
    """Rename whole files into a directory. When this returns, a power failure can't undo it. Raises: OSError."""
    for path in paths:
        sync(path)
    for path in paths:
        os.rename(path, directory / path.name)
    sync(directory)


def sync(path: Path) -> None:
    """Return when what a file or directory holds is on the disk. Raises: OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
