"""What is done to files that outlive the job, in an order that a crash can't turn into a mixture of old and new."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zinf_fx.checkpoint import freeing
from zinf_fx.errors import CheckpointError, ZinfError
from zinf_fx.native.engine import WRITE, File, FileTicket
from zinf_fx.regular_files import NotRegularError, open_regular

LOCK = "lock"

_HINTS = {
    errno.ENOSPC: "the file system is full: free space, or choose another directory",
    errno.EDQUOT: "the disk quota is used up: free space, or choose another directory",
    errno.EFBIG: "the file would exceed the limit on file sizes (`ulimit -f`, or the file system's own)",
    errno.EACCES: "it is not accessible for this user: change its mode, or choose another directory",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.ENOENT: "it is not there: name a directory with a checkpoint",
    errno.ENOTDIR: "a part of the path is no directory: name a directory",
    errno.EISDIR: "a directory is where a file belongs: move it elsewhere",
    errno.EEXIST: "it is there, and no directory: choose another name",
}


class Files:
    """What is done to files while a checkpoint is written, in the order in which it is done. Tests put others, which
    fail or forget, in its place."""

    def make_directory(self, path: Path) -> None:
        """Make it, if it is not there, in one that is."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """Open a new file for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def reserve(self, fd: int, nbytes: int) -> None:
        """Give the file so many bytes of the disk."""
        if not nbytes:
            return
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            freeing.wait_for_room()
            os.posix_fallocate(fd, 0, nbytes)

    def start_write(self, file: File, address: int, offset: int, nbytes: int, owner: object) -> FileTicket:
        """Start writing memory to a data file."""
        return file.submit(WRITE, address, offset, nbytes, owner)

    def write(self, fd: int, content: bytes | memoryview) -> None:
        """Write all of it, behind what was written."""
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]

    def sync_data(self, fd: int) -> None:
        """Wait until the bytes of a file are on the device."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """Wait until a file is on the device, or the names in a directory."""
        os.fsync(fd)

    def link(self, old: Path, new: Path) -> None:
        """Give a file one more name."""
        os.link(old, new, follow_symlinks=False)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file the name of another one, which is gone then."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there. Bytes of a large one are given back behind the caller."""
        freeing.remove(path)


FILES = Files()


@contextmanager
def refusals(attempt: str, path: Path) -> Iterator[None]:
    """Errors of the operating system in the block are raised as CheckpointErrors: what was attempted at `path`, what
    was found, and what to do."""
    try:
        yield
    except ZinfError:
        raise
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "see the system's log")
        if isinstance(error, NotRegularError):
            hint = "move it elsewhere"
        reason = error.strerror or str(error)
        raise CheckpointError(f"{attempt} failed at {path}: {reason}; {hint}") from error


def lies_within(path: str) -> bool:
    """Whether a path is relative, and leads nowhere above the directory that it begins in."""
    return path != "" and "\0" not in path and not os.path.isabs(path) and ".." not in Path(path).parts


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """A block in which no other process saves to the directory. Raises: CheckpointError when one does."""
    path, pid = directory / LOCK, os.getpid()
    while True:
        with refusals("saving a checkpoint", path):
            fd = _made_or_there(path)
        try:
            _lock(fd, directory)
            if _is_at(fd, path):  # else who had the lock has removed its file, and another one may have made it anew
                yield
                return
        finally:
            if os.getpid() == pid:  # a process made by fork meanwhile has the lock, too, until it is unlocked here
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _made_or_there(path: Path) -> int:
    """A descriptor of the lock's file."""
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # who had it has removed it meanwhile
                return open_regular(path, os.O_RDWR | os.O_NOFOLLOW)


def _lock(fd: int, directory: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"saving a checkpoint to {directory} was refused: another process saves to it now; choose another "
            "directory, or wait"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a file system without locks
            raise


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file still has the name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def make_directory(files: Files, directory: Path) -> None:
    """Make a directory, and those above it, as far as they are not there: the names of those that were made are on the
    device then."""
    missing = list(itertools.takewhile(lambda one: not one.exists(), (directory, *directory.parents)))
    for one in reversed(missing or [directory]):
        files.make_directory(one)
        if missing:
            sync(files, one.parent)


def sync(files: Files, path: Path) -> None:
    """Wait until a file is on the device, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        files.sync(fd)
    finally:
        os.close(fd)


def make_file(files: Files, path: Path, nbytes: int) -> None:
    """Make a file that has so many bytes of the disk."""
    fd = files.create(path)
    try:
        files.reserve(fd, nbytes)
    finally:
        os.close(fd)
