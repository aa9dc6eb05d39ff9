"""Names that a store's data file has elsewhere, and what of the file must stay for whoever has them.

A checkpoint may have the bytes that it is about in the store's own file, under a name of its own (a hard link): then
they outlive the store without being copied. All else in the file is given back when the store is closed or, after a
job that was killed, by whoever knows all names that the file has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from zinf_fx.plan.intervals import merged
from zinf_fx.regular_files import open_regular
from zinf_fx.runtime.memory.freelist import FreeList
from zinf_fx.sizes import PAGE

_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class Links:
    """The links of one data file, each with the bytes that it is there for."""

    def __init__(self, own: Path | None = None) -> None:
        """`own`: its name in its scratch directory, which somebody may remove; None: that stays."""
        self._own = own
        self._bytes: dict[Path, list[range]] = {}

    def add(self, path: Path, fd: int, content: Iterable[range]) -> None:
        """The file of `fd` has the name `path` by now, for these bytes of it."""
        self._bytes[path] = merged(content)
        with contextlib.suppress(OSError):  # a file system without locks: nobody else gives anything back there
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def forget(self, path: Path) -> None:
        """The file has this name no more."""
        self._bytes.pop(path, None)

    def gone(self, fd: int) -> set[Path]:
        """The names that the file of `fd` doesn't have any more. None, while it has others that are not known: the
        directory with the link may have been renamed; or while somebody `reads` it in place."""
        there, are_all = self._there(fd)
        gone = self._bytes.keys() - there if are_all else set()
        return gone if gone and is_alone(fd) else set()

    def are_all(self, fd: int) -> bool:
        """Whether the file of `fd` has no other names than these and its own."""
        return self._there(fd)[1]

    def _there(self, fd: int) -> tuple[set[Path], bool]:
        """The names that the file of `fd` still has, and whether these and its own are all: of one look, or a name that
        could not be looked at for a moment would be taken for one that is gone."""
        info = os.fstat(fd)
        there = {path for path in self._bytes if _is(path, info)}
        return there, info.st_nlink == len(there) + (self._own is None or _is(self._own, info))

    def give_back_others(self, fd: int) -> None:
        """Give back all bytes of the file that no link is there for."""
        gone = self.gone(fd)
        content = [part for path, parts in self._bytes.items() if path not in gone for part in parts]
        if content:
            give_back_all_but(fd, content)


def give_back_all_but(fd: int, content: Iterable[range]) -> None:
    """Give back what an open data file has besides some bytes and its first page: see `give_back`."""
    unused = FreeList([(PAGE, os.fstat(fd).st_size)])
    for part in content:
        unused.discard(part.start, part.stop)
    give_back(fd, (range(start, end) for start, end in unused))


def give_back(fd: int, extents: Iterable[range]) -> None:
    """Give back to the file system some bytes of an open file; its size stays. Where the file system can't do that,
    nothing happens."""
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end in ((extent.start, extent.stop) for extent in extents):
        arguments = fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(end - start)
        if libc.fallocate(*arguments) and ctypes.get_errno() in (errno.EOPNOTSUPP, errno.ENOSYS):
            return


def reads(fd: int, path: Path) -> bool:
    """Let whoever has the file of `fd`, which is called `path`, know that what links are there for is read in place for
    as long as it is open. Returns whether that is known before any of it can have been given back."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def is_alone(fd: int) -> bool:
    """Whether no other store has the file of `fd` open, and nobody reads it in place, as far as there are locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return True


@contextlib.contextmanager
def abandoned(directory: Path, name: str) -> Iterator[tuple[int, os.stat_result] | None]:
    """A block with the data file that a link in a directory stands for, open for writing, and what the system knows of
    it; None where its store is still in use, or the file can't be opened."""
    try:
        fd = _opened(directory, name)
    except OSError:
        yield None
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
        else:
            yield fd, os.fstat(fd)
    finally:
        os.close(fd)


def _opened(directory: Path, name: str) -> int:
    """A descriptor of a file in a directory, and of nothing that a link leads to."""
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_regular(name, os.O_RDWR | os.O_NOFOLLOW, directory=place)
    finally:
        os.close(place)


def _is(path: Path, info: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), info)
    except OSError:
        return False
