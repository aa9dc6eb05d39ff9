"""Large files are removed at once by their names; a thread gives back their bytes.

Where a file system tells its device of each freed extent, as with the mount option `discard`, that takes a second for
some GiB.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from pathlib import Path

from zinf_fx.runtime.disk.filesystem import taken_by

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
    """A descriptor of a file that is given back with its last name; None of others, and of one that can't be opened."""
    try:
        info = path.lstat()
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and taken_by(info) >= LARGE:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        pass
    return None


# A process made by fork would have the files, too, and keep their bytes for as long as it lives.
os.register_at_fork(before=wait_for_room)
