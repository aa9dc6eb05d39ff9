"""Memory that files take which other libraries have mapped.

safetensors maps a checkpoint, and pages that were read stay resident until the system is short of memory, or the
mapping ends. So a process that reads a checkpoint tensor by tensor looks as large as the checkpoint in the end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
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


class MappedCheckpoints:
    """Lets go of what the mappings of checkpoints hold, whenever this process has so much more of files in memory."""

    def __init__(self, every: int) -> None:
        """`every`: bytes."""
        self._every = every
        self._before = _bytes_of_files()

    def trim(self) -> None:
        """Let go if it is time. Whoever looks at the pages again reads them from the file, or the system's cache."""
        if _bytes_of_files() - self._before >= self._every:
            _let_go()
            self._before = _bytes_of_files()


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
    libc = ctypes.CDLL(None)
    for first, end, numbers in _MAPPING.findall(_SMAPS.read_text()):
        kilobytes = {name: int(number) for name, number in _NUMBER.findall(numbers)}
        if kilobytes["Anonymous"] or kilobytes["Swap"]:
            continue  # pages that somebody wrote to are nowhere else
        start, length = int(first, 16), int(end, 16) - int(first, 16)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _bytes_of_files() -> int:
    """What files, and memory that is shared, take of this process's resident memory; 0 where the system doesn't say."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
