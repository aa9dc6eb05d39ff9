"""Data files that an engine works on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zinf_fx.checkpoint.files import refusals
from zinf_fx.errors import StoreError
from zinf_fx.native.engine import READ, Engine, File, direct_alignment, is_direct
from zinf_fx.runtime.disk.probe import FATAL_FOR_EVERY_PROVIDER, candidates, listed
from zinf_fx.runtime.memory.buffers import aligned_empty
from zinf_fx.sizes import PAGE

log = logging.getLogger(__name__)


@contextmanager
def opened(paths: Sequence[Path], *, writable: bool) -> Iterator[list[File]]:
    """A block in which an engine works on files, which have a page at least: that of the first provider that can.

    Raises: StoreError when none can; CheckpointError when a file can't be opened.
    """
    if not paths:
        yield []
        return
    refused: dict[str, str] = {}
    with ExitStack() as rooms:
        files: list[File] | None = None
        for provider in candidates("auto", False) if files is None else ():
            try:
                with ExitStack() as attempt:
                    files = _attach(attempt, paths, provider, writable)
                    rooms.push(attempt.pop_all())
                break
            except StoreError as error:
                if error.errno in FATAL_FOR_EVERY_PROVIDER:
                    raise
                refused[provider] = str(error)
        if files is None:
            raise StoreError("open", paths[0], f"no I/O provider works here{listed(refused)}")
        level = logging.INFO if is_direct(provider) else logging.WARNING
        log.log(level, "checkpoint in %s: I/O by %s%s", paths[0].parent, provider, listed(refused))
        yield files


def _attach(rooms: ExitStack, paths: Sequence[Path], provider: str, writable: bool) -> list[File]:
    """The files, for the provider's engine, until `rooms` ends. Raises: StoreError when it can't read one."""
    engine = Engine(provider)
    rooms.callback(engine.close)
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | (os.O_DIRECT if is_direct(provider) else 0)
    page, files = aligned_empty(PAGE), []
    for path in paths:
        fd = _open(path, flags)
        rooms.callback(os.close, fd)
        alignment = direct_alignment(fd) if is_direct(provider) else PAGE
        if alignment != PAGE:
            raise StoreError("open", path, f"direct I/O needs an alignment of {alignment}, buffers have {PAGE}")
        file = engine.attach(fd, path, alignment=PAGE)
        rooms.callback(file.detach)
        if not files:
            file.submit(READ, page.data_ptr(), 0, PAGE, page).wait()
        files.append(file)
    return files


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags)
    except OSError as error:
        if flags & os.O_DIRECT and error.errno not in FATAL_FOR_EVERY_PROVIDER:
            raise StoreError("open", path, "the file can't be opened for direct I/O", errno=error.errno) from error
        with refusals("opening a data file", path):
            raise
