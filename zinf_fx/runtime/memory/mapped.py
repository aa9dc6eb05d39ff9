"""Memory that is mapped: from files without a name, and from none."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch

from zinf_fx.errors import StoreError
from zinf_fx.sizes import HUGE_PAGE, PAGE, blocks

_HINTS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.ENOENT: "the store's directory was removed while the job runs: make it anew, and keep cleaners away from it",
}


def memory_of_file(directory: Path, nbytes: int) -> mmap.mmap:
    """The memory of a new file without a name, which ends with it: the system can write it to the disk, and drop it.

    Raises: StoreError where there is no room.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "no file to map")
        raise StoreError("map", directory, hint, length=nbytes, errno=error.errno) from error


def mapped_empty(nbytes: int) -> torch.Tensor:
    """Ordinary memory for direct I/O, uint8, page-aligned, with whole pages behind it, which the system has back as
    soon as nobody has it. Of PyTorch's, what small objects lie beside stays.

    From 2 MiB on it is 2 MiB-aligned and asks for huge pages, with which direct I/O is about twice as fast. That takes
    fresh memory: what an allocator has used before stays in small ones.

    Raises:
        StoreError: the system has no such memory.
    """
    size = max(blocks(nbytes), PAGE)
    alignment = HUGE_PAGE if size >= HUGE_PAGE else PAGE
    try:
        mapping = mmap.mmap(-1, size + alignment - PAGE, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        hint = "none of this size is there; lower host_memory, or end what else has memory"
        raise StoreError("map", "memory", hint, length=size, errno=error.errno) from error
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % alignment
    if alignment == HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_NOHUGEPAGE)  # what nobody uses before and behind never becomes resident
            mapping.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE * HUGE_PAGE)
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=start)
