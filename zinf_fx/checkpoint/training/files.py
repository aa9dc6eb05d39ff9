"""The files of a checkpoint: their names, what is done to them, and what of them is left of a save that was cut off.

[Note: commits]
Data files have names that no save used before. When their bytes are on the device, and their names too, the manifest
is written under a name of its own, synced, and renamed to `manifest.json`; then the directory is synced. So the name
`manifest.json` stands for the old checkpoint or for the new one, whatever of the last operations a crash undoes, and in
whatever order they reach the device. What the manifest doesn't name is removed behind that, or by the next save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zinf_fx.errors import CheckpointError, ZinfError
from zinf_fx.native.engine import WRITE, File, FileTicket

MANIFEST, NEW_MANIFEST, LOCK = "manifest.json", "manifest.json.new", "lock"
_DATA = re.compile(r"data-[0-9a-f]{8}-\d+-\d+\.safetensors")
# Bytes: of a manifest of ten trillion parameters.
_LARGEST_MANIFEST = 4 << 30

_HINTS = {
    errno.ENOSPC: "the file system is full: free space, or choose another directory",
    errno.EDQUOT: "the disk quota is used up: free space, or choose another directory",
    errno.EFBIG: "the file would exceed the limit on file sizes (`ulimit -f`, or the file system's own)",
    errno.EACCES: "it is not accessible for this user: change its mode, or choose another directory",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.ENOENT: "it is not there: name a directory with a checkpoint",
    errno.ENOTDIR: "a part of the path is no directory: name a directory",
    errno.EEXIST: "it is there, and no directory: choose another name",
}


class Files:
    """What is done to files while a checkpoint is written, in the order in which it is done. Tests put others, which
    fail or forget, in its place."""

    def make_directory(self, path: Path) -> None:
        """Make it, and those above it, if they are not there."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Open a new file for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def reserve(self, fd: int, nbytes: int) -> None:
        """Give the file so many bytes of the disk."""
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)

    def start_write(self, file: File, address: int, offset: int, nbytes: int, owner: object) -> FileTicket:
        """Start writing memory to a data file."""
        return file.submit(WRITE, address, offset, nbytes, owner)

    def write(self, fd: int, content: bytes) -> None:
        """Write a whole small file."""
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]

    def sync_data(self, fd: int) -> None:
        """Wait until the bytes of a file are on the device."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """Wait until a file is on the device, or the names in a directory."""
        os.fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file the name of another one, which is gone then."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)


FILES = Files()


def data_name(save: str, rank: int, number: int) -> str:
    """The name of a data file: of which save, rank and number."""
    return f"data-{save}-{rank}-{number}.safetensors"


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
        reason = error.strerror or str(error)
        raise CheckpointError(f"{attempt} failed at {path}: {reason}; {hint}") from error


def read_manifest(directory: Path) -> bytes:
    """The content of a checkpoint's manifest. Raises: CheckpointError when there is none, saying what there is."""
    path = directory / MANIFEST
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_MANIFEST + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no checkpoint to load: {_instead(directory)}") from None
    except OSError as error:
        with refusals("reading a checkpoint", path):
            raise error
    if len(content) > _LARGEST_MANIFEST:
        raise CheckpointError(
            f"{path} has more than {_LARGEST_MANIFEST} bytes, and no manifest has: it is another file"
        )
    return content


def _instead(directory: Path) -> str:
    if not directory.exists():
        return "there is no such directory; name one that save_checkpoint() wrote"
    if leftovers(directory, ()):
        return f"a save was cut off before it wrote {MANIFEST}, and what it left is no checkpoint; use another one"
    return f"there is no {MANIFEST} in it; name a directory that save_checkpoint() wrote"


def leftovers(directory: Path, named: tuple[str, ...]) -> list[Path]:
    """What saves left in a directory that were cut off: files with our names that the manifest doesn't name."""
    with refusals("looking for what is left of a save", directory):
        found = sorted(os.listdir(directory))
    return [directory / name for name in found if name not in named and (name == NEW_MANIFEST or _DATA.fullmatch(name))]


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """A block in which no other process saves to the directory. Raises: CheckpointError when one does."""
    path = directory / LOCK
    with refusals("saving a checkpoint", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
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
        yield
    finally:
        os.close(fd)


def sync_directory(files: Files, directory: Path) -> None:
    """Wait until the names in a directory are on the device."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        files.sync(fd)
    finally:
        os.close(fd)


def commit(files: Files, directory: Path, manifest: bytes) -> None:
    """Make the manifest that of the directory: see [Note: commits]. Its data files are on the device."""
    new = directory / NEW_MANIFEST
    files.remove(new)
    fd = files.create(new)
    try:
        files.write(fd, manifest)
        files.sync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(new)
        raise
    finally:
        os.close(fd)
    files.rename(new, directory / MANIFEST)
    sync_directory(files, directory)
