"""safetensors (0.4.3 to 0.8): checkpoints that are mapped into memory, whose pages go back to the system.

Pages that were read or written stay resident until the system is short of memory, or the mapping ends. So a process
that reads a checkpoint tensor by tensor looks as large as the checkpoint in the end.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_SMAPS, _STATM, _MAPS = Path("/proc/self/smaps"), Path("/proc/self/statm"), Path("/proc/self/maps")

# A private mapping of a checkpoint: from where to where, the file, and lines that say how much of it is what.
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) ...p [0-9a-f]+ \S+ \d+ +/.*\.safetensors\n((?:[A-Z]\w+: .*\n)+)", re.MULTILINE
)
_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ...p ([0-9a-f]+) \S+ \d+ +(/.*\.safetensors)$", re.MULTILINE)
_NUMBER = re.compile(r"^(\w+): +(\d+) kB$", re.MULTILINE)


class MappedFiles:
    """Lets go of what the mappings of checkpoints hold, and those of files that were made here, whenever this process
    has so much more of files in memory.

    `every`: how many bytes more; `new_file`: makes the memory of a new file of so many bytes.
    """

    def __init__(self, every: int, new_file: Callable[[int], mmap.mmap]) -> None:
        self._every, self._new_file = every, new_file
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
        """A tensor in the memory of a new file, which ends with it. Raises: what `new_file` does without room."""
        mapping = self._new_file(math.prod(shape) * dtype.itemsize)
        self._made.add(mapping)
        return torch.frombuffer(mapping, dtype=dtype).view(tuple(shape))

    def has(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all these are in the memory of files that are let go."""
        addresses = [range(int(first, 16), int(end, 16)) for first, end, _, _ in _FILE.findall(_MAPS.read_text())]
        for mapping in self._made:
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            addresses.append(range(start, start + len(mapping)))
        return all(any(tensor.data_ptr() in memory for memory in addresses) for tensor in tensors)


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
