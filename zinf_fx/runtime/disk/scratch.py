"""The per-job scratch directory: made, locked, and removed by the job that made it, or reclaimed when that job is dead.

A scratch directory is called zinf-scratch-PID-RANDOM, has mode 0700, and holds only a lock file and data files with the
names below. The lock (flock) lives as long as the job, however it ends. Nothing else is ever deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from zinf_fx.config import Config
from zinf_fx.errors import StoreError
from zinf_fx.regular_files import open_regular
from zinf_fx.runtime.disk.ownership import is_alike, is_proven

log = logging.getLogger(__name__)

LOCK = "lock"
IN_USE = "its job is running"
UNLOCKED = "lock.new"
NAME = re.compile(r"zinf-scratch-\d+-[0-9a-f]{16}")
_CLOSED = -1
PROBE = "probe"
CONTENT = re.compile(r"lock|lock\.new|probe|data-\d+")

HINTS = {
    errno.ENOENT: "the store directory does not exist; create it, or name another one with `store`",
    errno.ENOTDIR: "the store is not a directory; name a directory with `store`",
    errno.EACCES: "the store directory is not writable for this user; change its mode, or name another one",
    errno.EPERM: "the store directory is not writable for this user; change its mode, or name another one",
    errno.EROFS: "the store directory is on a read-only file system; name another one with `store`",
    errno.ENOSPC: "the file system is full; free space, or name another store directory",
    errno.EDQUOT: "the disk quota is used up; free space, or name another store directory",
}


@contextlib.contextmanager
def refusals(operation: str, path: Path, otherwise: str) -> Iterator[None]:
    """Errors of the operating system in the block are raised as StoreErrors, with what to do, or else `otherwise`."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(operation, path, HINTS.get(error.errno or 0, otherwise), errno=error.errno) from error


def make_default(config: Config) -> None:
    """Makes the directories of the default store, as far as they are not there; one that the user names must be.

    Raises: StoreError.
    """
    for directory in config.stores if config.store_is_default else ():
        with refusals("create", directory, "the default store can't be made; name another directory with `store`"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def data_name(number: int) -> str:
    """The name of a data file in a scratch directory."""
    return f"data-{number}"


class Scratch:
    """A scratch directory that this process holds the lock of.

    Raises:
        StoreError: the parent is missing, is no directory, or can't be written to. Nothing is left behind.
    """

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"zinf-scratch-{os.getpid()}-{secrets.token_hex(8)}"
        self._pid = os.getpid()
        self._lock: int | None = None
        self._directory = _CLOSED  # of the directory itself: another one may come to have its path
        self._made: list[str] = []
        with refusals("open", parent, "no scratch directory"):
            if not stat.S_ISDIR(os.stat(parent).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            os.mkdir(self.path, 0o700)
        try:
            with refusals("open", self.path, "no scratch directory"):
                self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            # The lock appears under its name only when it is held: a lock file that isn't locked belongs to a dead job.
            self._lock = self.create(UNLOCKED)
            with refusals("lock", self.path, "no lock for the scratch directory"):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(UNLOCKED, LOCK, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except BaseException:
            self.remove()
            raise

    @property
    def is_ours(self) -> bool:
        """False in a process made by fork."""
        return os.getpid() == self._pid

    def create(self, name: str) -> int:
        """Makes a file of mode 0600 in the directory and opens it for reading and writing."""
        assert CONTENT.fullmatch(name), f"{name!r} is no name for a scratch file"
        path = self.path / name
        with refusals("create", path, "no scratch file"):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=self._directory)
        self._made.append(name)
        return fd

    def link(self, path: Path, name: str) -> None:
        """Gives a file elsewhere on the device a name in the directory, too. Raises: StoreError."""
        assert CONTENT.fullmatch(name), f"{name!r} is no name for a scratch file"
        try:
            os.link(path, name, dst_dir_fd=self._directory, follow_symlinks=False)
        except OSError as error:  # hints are about store directories, and nothing is wrong with this one
            raise StoreError("link", path, "it gets no other name there", errno=error.errno) from error
        self._made.append(name)

    def open(self, name: str) -> int:
        """Opens a file in the directory for reading and writing. Raises: StoreError."""
        path = self.path / name
        with refusals("open", path, "the file can't be opened"):
            return open_regular(name, os.O_RDWR | os.O_NOFOLLOW, directory=self._directory)

    def unlink(self, name: str) -> None:
        """Removes a file's name in the directory, if it got one."""
        if name in self._made:
            self._made.remove(name)
            self._remove_name(name)

    def remove(self) -> None:
        """Deletes the files that this object made, the directory, and the lock; in a forked child nothing. Either way,
        closes this process's descriptor of the lock."""
        if self.is_ours:
            for name in [*self._made, LOCK] if self._directory != _CLOSED else ():
                self._remove_name(name)
            self._made.clear()
            try:
                if self._has_path:
                    os.rmdir(self.path)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("scratch directory %s stays: %s", self.path, error)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._directory != _CLOSED:
            os.close(self._directory)
            self._directory = _CLOSED

    @property
    def _has_path(self) -> bool:
        """Whether the directory at the path is this one. Raises: OSError."""
        info = os.stat(self.path, follow_symlinks=False)
        return self._directory == _CLOSED or os.path.samestat(info, os.fstat(self._directory))

    def _remove_name(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)


def orphans(directory: Path | str) -> list[Path]:
    """The scratch directories of dead jobs below `directory`. Raises: StoreError when `directory` can't be read."""
    return [path for path, stays in survey(directory, remove=False).items() if stays is None]


def survey(directory: Path | str, *, remove: bool) -> dict[Path, str | None]:
    """What has the name of a scratch directory below `directory`, and why it stays; None for those of dead jobs, which
    are removed if `remove`. Raises: StoreError when `directory` can't be read.

    A directory stays whose lock is held, or which doesn't look exactly like a scratch directory.
    """
    directory = Path(directory)
    with refusals("clean", directory, "can't be read"):
        names = sorted(os.listdir(directory))
    return {directory / name: _why_it_stays(directory / name, remove=remove) for name in names if NAME.fullmatch(name)}


def _why_it_stays(path: Path, *, remove: bool) -> str | None:
    """Return why the directory stays: see `survey`. It works on descriptors, never through links: nothing outside
    the directory can be reached."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return f"it can't be opened ({error.strerror})"
    try:
        info = os.fstat(fd)
        names = os.listdir(fd)
        if info.st_uid != os.geteuid():
            return f"it belongs to user {info.st_uid}"
        if stat.S_IMODE(info.st_mode) != 0o700:
            return f"its mode is {stat.S_IMODE(info.st_mode):o}, not that of a scratch directory"
        if LOCK not in names:
            return "it has no lock: a job is starting, or was killed while it did; if so, remove the directory by hand"
        if not all(CONTENT.fullmatch(name) and _is_of_store(fd, name) for name in names):
            return "it holds something that the store didn't make"
        return None if _if_unlocked(path, fd, names, remove=remove) else IN_USE
    except FileNotFoundError:
        return "somebody else is removing it"
    except OSError as error:
        return f"it can't be removed ({error.strerror})"
    finally:
        os.close(fd)


def _is_of_store(directory: int, name: str) -> bool:
    """Whether a file is what its name says. A checkpoint may have a data file under another name, too, and keeps it."""
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode) or not (info.st_nlink == 1 or name.startswith("data-")):
        return False
    if not info.st_size or name == PROBE:
        return True
    if not name.startswith("data-"):
        return False  # nothing is written to a lock
    fd = open_regular(name, os.O_RDONLY | os.O_NOFOLLOW, directory=directory)
    try:
        return is_proven(fd) or is_alike(fd)
    finally:
        os.close(fd)


def _if_unlocked(path: Path, directory: int, names: list[str], *, remove: bool) -> bool:
    lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not remove:
            return True
        for name in sorted(names, key=lambda name: name == LOCK):
            os.unlink(name, dir_fd=directory)
        os.rmdir(path)
        return True
    finally:
        os.close(lock)
