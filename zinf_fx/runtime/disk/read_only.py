"""Files of somebody else, of which tensors are read where they are: a base that several jobs share."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from zinf_fx.errors import StoreError
from zinf_fx.native.engine import READ, Engine, File, FileTicket, direct_alignment, is_direct
from zinf_fx.regular_files import open_regular
from zinf_fx.runtime.disk.links import reads
from zinf_fx.runtime.memory.transfers import JoinedTicket, Ticket
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.sizes import PAGE, blocks

BUFFERED = "buffered"
"""The provider that reads from any offset, through the page cache."""


class ReadOnlyFile:
    """A file that is opened for reading. What begins at a page is read directly, all else through the page cache. If it
    is a store's, what a checkpoint has there stays as it is, also when the checkpoint is removed meanwhile.

    Args:
        path: an existing file.
        provider: that of the store, which is used where it reads directly.
        engine: gives the engine for a device (its st_dev) and a provider.

    Raises: StoreError where it can't be opened.
    """

    def __init__(self, path: Path, provider: str, engine: Callable[[int, str], Engine]) -> None:
        self.path = path
        self._files: dict[bool, File] = {}  # by whether it reads directly
        try:
            plain = open_regular(path)
        except OSError as error:
            raise StoreError("open", path, "the file can't be read", errno=error.errno) from error
        descriptors = [plain]
        self._close = weakref.finalize(self, _close, self._files, descriptors)
        if not reads(plain, path):
            raise StoreError("open", path, "it is being changed: if it is still there, try again")
        status = os.fstat(plain)
        self.nbytes = status.st_size
        self._files[False] = engine(status.st_dev, BUFFERED).attach(plain, path, alignment=1)
        if is_direct(provider) and direct_alignment(plain) == PAGE:
            try:
                descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
            except OSError as error:  # a file system without direct I/O
                if error.errno != errno.EINVAL:
                    raise StoreError("open", path, "the file can't be read directly", errno=error.errno) from error
            else:
                self._files[True] = engine(status.st_dev, provider).attach(descriptors[-1], path, alignment=PAGE)

    def read(self, address: int, offset: int, nbytes: int, owner: object) -> FileTicket:
        """Start reading into memory at `address`, which has room for whole pages."""
        length = blocks(nbytes)
        direct = offset % PAGE == 0 and address % PAGE == 0 and offset + length <= self.nbytes and True in self._files
        ticket = self._files[direct].submit(READ, address, offset, length if direct else nbytes, owner)
        RECORDER.stored("fetch", nbytes, [ticket])
        return ticket

    def detach(self) -> None:
        """Waits for what is under way. A forked child leaves it alone."""
        _detach(self._files)


def _detach(files: dict[bool, File]) -> None:
    for file in files.values():
        file.detach()


def _close(files: dict[bool, File], descriptors: list[int]) -> None:
    """What is left when nobody reads the file any more."""
    _detach(files)
    while descriptors:
        os.close(descriptors.pop())


class FileExtent:
    """Consecutive bytes of a read-only file, in the place of space in a store."""

    def __init__(self, file: ReadOnlyFile, offset: int, nbytes: int) -> None:
        """Raises: StoreError where the file ends before them."""
        if offset + nbytes > file.nbytes:
            raise StoreError(
                "read", file.path, "the file ends before the tensor does: copy it anew", offset=offset, length=nbytes
            )
        self._file, self._offset, self._nbytes = file, offset, nbytes

    @property
    def path(self) -> Path:
        return self._file.path

    def read(self, address: int, offset: int, nbytes: int, *, owner: object = None) -> Ticket:
        """Start a `Store.read`. It leaves memory for what is behind the end, as padding is, as it was."""
        if offset >= self._nbytes:
            return JoinedTicket(())
        return self._file.read(address, self._offset + offset, min(nbytes, self._nbytes - offset), owner)

    def write(self, address: int, offset: int, nbytes: int, *, owner: object = None) -> NoReturn:
        """Raises: StoreError."""
        raise StoreError(
            "write",
            self.path,
            "a tensor that is read in place from a base, which other jobs may share, can't change: offload() a model "
            "of its own to change it, or merge adapters into one",
            offset=self._offset + offset,
            length=nbytes,
        )

    def checksum(self, offset: int, nbytes: int) -> None:
        """None: there are no checksums of what others wrote."""

    def free(self) -> None:
        """Nothing is given back: the file is closed when nobody has any of it."""
