"""Host memory: mapped, aligned for direct I/O, and registered with a device so that it copies faster.

[Note: slabs]  Memory is registered with a device in slabs, at multiples of SLAB, when it is first allocated: only what
is used becomes resident, and no slab is registered in part. CUDA refuses a copy that crosses the border between two
registrations, or between registered and other memory, so that copies are cut there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from zinf_fx.errors import StoreError
from zinf_fx.sizes import HUGE_PAGE, PAGE, blocks, round_up

log = logging.getLogger(__name__)

SLAB = 64 << 20

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


def aligned_empty(nbytes: int) -> torch.Tensor:
    """Ordinary memory for direct I/O that the caller owns: uint8, 4096-aligned, the length rounded up to 4096.

    From 2 MiB on it is a mapping of its own, in huge pages where the system grants them: `mapped_empty`.
    """
    size = blocks(nbytes)
    if size >= HUGE_PAGE:
        return mapped_empty(size)
    whole = torch.empty(size + PAGE, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % PAGE
    # The first byte of a storage of its own, because views may be made by their offset in the storage (`as_strided`).
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(whole.untyped_storage()[start : start + size])


def octets(memory: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which the caller keeps alive."""
    array = (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())
    return memoryview(array).cast("B")


class Registry(Protocol):
    """What host memory is registered with."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Make memory known, which becomes resident. What went wrong, or None."""

    def unregister(self, address: int) -> None:
        """Forget memory that is about to go."""


def slabs(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """The parts (start, end) of [start, start + nbytes) that lie in one slab each."""
    end = start + nbytes
    while start < end:
        border = min(end, round_up(start + 1, SLAB))
        yield start, border
        start = border


class HostMapping(mmap.mmap):
    """A private mapping, and the slabs of it that a device knows until it goes."""

    _registry: Registry | None = None  # of one that the system refused, which is never initialised

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._registry = None
        self._refused = False
        self._known: set[int] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def serve(self, registry: Registry) -> None:
        """What is used from now on is to be registered; with the first registry, if asked for several times."""
        self._registry = self._registry or registry

    def use(self, start: int, nbytes: int, end: int) -> None:
        """Register the slabs of [start, start + nbytes), as far as they lie before the address `end`."""
        if self._registry is None or self._refused:
            return
        with self._lock:
            for first, _ in slabs(start, nbytes):
                slab = first // SLAB * SLAB
                if slab in self._known or self._refused:
                    continue
                problem = self._registry.register(slab, min(SLAB, end - slab))
                if problem is None:
                    self._known.add(slab)
                else:
                    self._refused = True
                    log.warning("host memory can't be pinned, so copies to the device will be slow: %s", problem)

    def knows(self, address: int) -> bool:
        """Whether the slab of an address is registered."""
        return address // SLAB * SLAB in self._known

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # which is no name of the module's at exit
        if self._registry is not None and getpid() == self._pid:  # a process made by fork can't talk to the device
            for slab in self._known:
                self._registry.unregister(slab)
