"""Data files that an engine works on."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zinf_fx.checkpoint.files import Files, refusals
from zinf_fx.errors import StoreError
from zinf_fx.native.engine import READ, Engine, File, direct_alignment, is_direct
from zinf_fx.regular_files import NotRegularError, open_regular
from zinf_fx.runtime.disk.probe import FATAL_FOR_EVERY_PROVIDER, candidates, listed
from zinf_fx.runtime.memory.buffers import aligned_empty
from zinf_fx.sizes import PAGE

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

    def __getitem__(self, number: int) -> File:
        """The file. Raises: CheckpointError, StoreError when it can't be opened; OSError of one that makes room."""
        if number not in self._open:
            while len(self._open) >= AT_ONCE:
                self._end_oldest()
            self._open[number] = self._attached(self._paths[number])
        self._open.move_to_end(number)
        return self._open[number][1]

    def __len__(self) -> int:
        return len(self._paths)

    def end(self) -> None:
        """All was read or written: what was written is on the device when this returns. Raises: OSError."""
        while self._open:
            self._end_oldest()

    def close(self) -> None:
        """Give back what is open."""
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
    """A block in which an engine works on files, which have a page at least: that of the first provider that can. With
    `files` they are written, and on the device when the block ended well.

    Raises: StoreError when none can; CheckpointError when a file can't be opened; OSError.
    """
    if not paths:
        yield ()
        return
    several = _working(paths, files)
    try:
        yield several
        several.end()
    finally:
        several.close()


def _working(paths: Sequence[Path], files: Files | None) -> OpenFiles:
    """The files, for the first provider's engine that can read one of them."""
    refused: dict[str, str] = {}
    for provider in candidates("auto", False):
        several = None
        try:
            several = OpenFiles(paths, provider, files)
            page = aligned_empty(PAGE)
            several[0].submit(READ, page.data_ptr(), 0, PAGE, page).wait()
        except BaseException as error:
            if several is not None:
                several.close()
            if not isinstance(error, StoreError) or error.errno in FATAL_FOR_EVERY_PROVIDER:
                raise
            refused[provider] = str(error)
        else:
            level = logging.INFO if is_direct(provider) else logging.WARNING
            log.log(level, "checkpoint in %s: I/O by %s%s", paths[0].parent, provider, listed(refused))
            return several
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
