"""What is done to files that outlive the job, in an order that a crash can't turn into a mixture of old and new."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from zinf_fx.errors import CheckpointError, StoreError, ZinfError
from zinf_fx.native.engine import READ, WRITE, Engine, File, FileTicket, direct_alignment, is_direct
from zinf_fx.regular_files import NotRegularError, check_regular, open_regular
from zinf_fx.runtime.disk.filesystem import taken_by
from zinf_fx.runtime.disk.probe import FATAL_FOR_EVERY_PROVIDER, candidates, listed
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.sizes import PAGE

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
    """What is done to files while a checkpoint is written, in the order in which it is done. Tests replace it by
    others, which fail or forget."""

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
            wait_for_room()
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
        remove(path)


FILES = Files()


@contextmanager
def refusals(attempt: str, path: Path) -> Iterator[None]:
    """Open a block whose errors of the operating system are raised as CheckpointErrors. They say what was attempted at
    `path`, what was found, and what to do."""
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
    """Open a block in which no other process saves to the directory. Raises: CheckpointError when one does."""
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
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def make_directory(files: Files, directory: Path) -> None:
    """Make a directory, and those above it, as far as they are not there: the names of those that were made are on the
    device then."""
    missing = list(itertools.takewhile(lambda path: not path.exists(), (directory, *directory.parents)))
    for path in reversed(missing or [directory]):
        files.make_directory(path)
        if missing:
            sync(files, path.parent)


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


LARGE = 64 << 20
"""Bytes of a file, from which on it is worth a thread."""

_under_way: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def remove(path: Path) -> None:
    """Remove a file, if it is there: its name is gone when this returns. Raises: OSError."""
    fd = _opened_if_large(path)
    try:
        path.unlink(missing_ok=True)
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise
    if fd is not None:
        thread = threading.Thread(target=os.close, args=(fd,), name="zinf: freeing a file")
        try:
            thread.start()
        except RuntimeError:  # there can't be more threads
            os.close(fd)
        else:
            _under_way.add(thread)


def wait_for_room() -> None:
    """Wait until what was removed is given back."""
    for thread in list(_under_way):
        thread.join()


def _opened_if_large(path: Path) -> int | None:
    """Return a descriptor of a file that is freed with its last name; None for others, and where it can't be opened."""
    try:
        info = path.lstat()
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and taken_by(info) >= LARGE:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        pass
    return None


# A process made by fork would have the files, too, and keep their bytes for as long as it lives.
os.register_at_fork(before=wait_for_room)


_FOLDER = ".zinf-unfinished"


@contextmanager
def unfinished(directory: Path, files: Files) -> Iterator[Path]:
    """Give a folder for new files in `directory`, which is made where it is missing. What was not renamed from there by
    the end of the block is removed.

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


log = logging.getLogger(__name__)

AT_ONCE = 256
"""How many data files are open at a time, at most: processes may have 1024 of all kinds, unless they ask for more."""


class OpenFiles(Sequence[File]):
    """Data files by number, of which the last that were asked for are open."""

    def __init__(self, paths: Sequence[Path], provider: str, files: Files | None) -> None:
        """`files`: what is done to those that are written; None: they are read."""
        self._paths, self._files, self._is_direct = paths, files, is_direct(provider)
        self._engine = Engine(provider)
        self._open: OrderedDict[int, tuple[int, File]] = OrderedDict()

    def __getitem__(self, number: int) -> File:  # pyright: ignore[reportIncompatibleMethodOverride]  (no slices)
        """Return the file. Raises: CheckpointError, StoreError when it can't be opened; OSError of one that makes
        room."""
        if number not in self._open:
            while len(self._open) >= AT_ONCE:
                self._end_oldest()
            self._open[number] = self._attached(self._paths[number])
        self._open.move_to_end(number)
        return self._open[number][1]

    def __len__(self) -> int:
        return len(self._paths)

    def end(self) -> None:
        """Close all files. What was written is on the device when this returns. Raises: OSError."""
        while self._open:
            self._end_oldest()

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            fd, file = self._open.popitem()[1]
            file.detach()
            os.close(fd)
        self._engine.close()

    def _end_oldest(self) -> None:
        number, (fd, file) = next(iter(self._open.items()))
        file.detach()
        if self._files is not None:
            self._files.sync_data(fd)
        del self._open[number]
        os.close(fd)

    def _attached(self, path: Path) -> tuple[int, File]:
        flags = os.O_RDONLY if self._files is None else os.O_RDWR | os.O_NOFOLLOW
        fd = _open(path, flags | os.O_DIRECT if self._is_direct else flags)
        try:
            alignment = direct_alignment(fd) if self._is_direct else PAGE
            if alignment != PAGE:
                raise StoreError("open", path, f"direct I/O needs an alignment of {alignment}, buffers have {PAGE}")
            return fd, self._engine.attach(fd, path, alignment=PAGE)
        except BaseException:
            os.close(fd)
            raise


@contextmanager
def opened(paths: Sequence[Path], files: Files | None = None) -> Iterator[Sequence[File]]:
    """Open files, of a page at least, for a block, with the engine of the first provider that can read them. With
    `files` they are written, and are on the device when the block has ended well.

    Raises: StoreError when none can; CheckpointError when a file can't be opened; OSError.
    """
    if not paths:
        yield ()
        return
    open_files = _working(paths, files)
    try:
        yield open_files
        open_files.end()
    finally:
        open_files.close()


def _working(paths: Sequence[Path], files: Files | None) -> OpenFiles:
    """Open the files with the first provider's engine that can read one of them."""
    refused: dict[str, str] = {}
    for provider in candidates("auto", False):
        open_files = None
        try:
            open_files = OpenFiles(paths, provider, files)
            page = aligned_empty(PAGE)
            open_files[0].submit(READ, page.data_ptr(), 0, PAGE, page).wait()
        except BaseException as error:
            if open_files is not None:
                open_files.close()
            if not isinstance(error, StoreError) or error.errno in FATAL_FOR_EVERY_PROVIDER:
                raise
            refused[provider] = str(error)
        else:
            level = logging.INFO if is_direct(provider) else logging.WARNING
            log.log(level, "checkpoint in %s: I/O by %s%s", paths[0].parent, provider, listed(refused))
            return open_files
    raise StoreError("open", paths[0], f"no I/O provider works here{listed(refused)}")


def _open(path: Path, flags: int) -> int:
    try:
        return open_regular(path, flags)
    except OSError as error:
        is_regular = not isinstance(error, NotRegularError)
        if is_regular and flags & os.O_DIRECT and error.errno not in FATAL_FOR_EVERY_PROVIDER:
            raise StoreError("open", path, "the file can't be opened for direct I/O", errno=error.errno) from error
        with refusals("opening a data file", path):
            raise
