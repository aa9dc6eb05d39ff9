"""Files that anybody may have made are opened so that nothing waits: of a FIFO or a device, `open` may never return."""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link to another place",
}
_AT_ONCE = 1 << 20


class NotRegularError(OSError):
    """What is there is no regular file, and wasn't opened."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, directory: int | None = None) -> int:
    """A descriptor of a regular file, relative to the descriptor of a directory if one is given. With O_NOFOLLOW among
    the flags, a link is refused. Raises: NotRegularError, OSError."""
    check_regular(os.stat(path, dir_fd=directory, follow_symlinks=not flags & os.O_NOFOLLOW), path)
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        check_regular(os.fstat(fd), path)  # another one may have come there meanwhile
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(info: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raises: NotRegularError, or IsADirectoryError, for what is no regular file."""
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
        raise NotRegularError(errno.EINVAL, f"it is {kind}, and no regular file", str(path))


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most so many bytes. Raises: NotRegularError, OSError."""
    return _content(open_regular(path), path, most)


def read_at_once(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a file of any kind: of a device what it has now, and of a pipe, such as a shell's
    `<(zcat plan.json.gz)`, all that comes while its other end is open. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.set_blocking(fd, True)
    return _content(fd, path, most)


def _content(fd: int, path: str | os.PathLike[str], most: int) -> bytes:
    """All of an open file, which is closed. Of some files, the size doesn't say how much there is."""
    content = bytearray()
    with open(fd, "rb", buffering=0) as file:
        size = os.fstat(fd).st_size
        while size <= most and (part := file.read(_AT_ONCE)):
            content += part
            size = max(size, len(content))
    if size > most:
        raise OSError(errno.EFBIG, f"it has more bytes than {most}", str(path))
    return bytes(content)
