"""Memory that is mapped: from files of checkpoints, which safetensors maps, from files without a name, and from none.

Pages that were read or written stay resident until the system is short of memory, or the mapping ends. So a process
that reads a checkpoint tensor by tensor looks as large as the checkpoint in the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zinf_fx.errors import StoreError
from zinf_fx.sizes import HUGE_PAGE, PAGE, blocks

_SMAPS, _STATM, _MAPS = Path("/proc/self/smaps"), Path("/proc/self/statm"), Path("/proc/self/maps")

# A private mapping of a checkpoint: from where to where, the file, and lines that say how much of it is what.
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) ...p [0-9a-f]+ \S+ \d+ +/.*\.safetensors\n((?:[A-Z]\w+: .*\n)+)", re.MULTILINE
)
_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ...p ([0-9a-f]+) \S+ \d+ +(/.*\.safetensors)$", re.MULTILINE)
_NUMBER = re.compile(r"^(\w+): +(\d+) kB$", re.MULTILINE)


_HINTS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.ENOENT: "the store's directory was removed while the job runs: make it anew, and keep cleaners away from it",
}


class MappedFiles:
    """Lets go of what the mappings of checkpoints hold, and those of files that were made here, whenever this process
    has so much more of files in memory."""

    def __init__(self, every: int, directory: Path) -> None:
        """`every`: bytes; `directory`: for new files."""
        self._every, self._directory = every, directory
        self._before = _bytes_of_files()
        self._made: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def trim(self) -> None:
        """Let go if it is time. Whoever looks at the pages again reads them from the file, or the system's cache."""
        if _bytes_of_files() - self._before >= self._every:
            _let_go()
            for mapping in self._made:
                mapping.madvise(mmap.MADV_DONTNEED)  # what was written is in the file
            self._before = _bytes_of_files()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the memory of a new file, which ends with it. Raises: StoreError where there is no room."""
        mapping = memory_of_file(self._directory, math.prod(shape) * dtype.itemsize)
        self._made.add(mapping)
        return torch.frombuffer(mapping, dtype=dtype).view(tuple(shape))

    def has(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all these are in the memory of files that are let go."""
        addresses = [range(int(first, 16), int(end, 16)) for first, end, _, _ in _FILE.findall(_MAPS.read_text())]
        for mapping in self._made:
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            addresses.append(range(start, start + len(mapping)))
        return all(any(tensor.data_ptr() in one for one in addresses) for tensor in tensors)


def memory_of_file(directory: Path, nbytes: int) -> mmap.mmap:
    """The memory of a new file without a name, which ends with it: the system can write it to the disk, and drop it.

    Raises: StoreError where there is no room.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        hint = _HINTS.get(error.errno, "no file to map")
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


class InFile(NamedTuple):
    """Where in a checkpoint's file a value begins."""

    name: str
    file_bytes: int
    offset: int


def place_in_file(value: torch.Tensor) -> InFile | None:
    """Where the elements of a tensor on the CPU are in a checkpoint that is mapped, if they are there, in order."""
    if value.device.type != "cpu" or not value.is_contiguous() or not value.numel():
        return None
    address = value.data_ptr()
    for first, end, offset, path in _FILE.findall(_MAPS.read_text()):
        start = int(first, 16)
        if start <= address and address + value.nbytes <= int(end, 16):
            return InFile(os.path.basename(path), os.stat(path).st_size, int(offset, 16) + address - start)
    return None


def _let_go() -> None:
    if not _SMAPS.exists():
        return
    libc = ctypes.CDLL(None)
    for first, end, numbers in _MAPPING.findall(_SMAPS.read_text()):
        kilobytes = {name: int(number) for name, number in _NUMBER.findall(numbers)}
        if kilobytes.get("Anonymous", 1) or kilobytes.get("Swap", 0):
            continue  # pages that somebody wrote to are nowhere else
        start, length = int(first, 16), int(end, 16) - int(first, 16)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _bytes_of_files() -> int:
    """What files, and memory that is shared, take of this process's resident memory; 0 where the system doesn't say."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
