"""What memory this process may take, and what it holds of memory that was freed."""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zinf_fx.control_groups import control_groups
from zinf_fx.sizes import in_words

_STATUS = Path("/proc/self/status")
# Of all that a process maps, used or not: how a shell sets the limit, and what counts towards it.
_OF_MAPPINGS = {resource.RLIMIT_AS: ("ulimit -v", "VmSize"), resource.RLIMIT_DATA: ("ulimit -d", "VmData")}

# The options of mallopt(3), and what `hold_little` sets them to, in bytes: the most that glibc takes as the second.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_AT_THE_END, _LARGE = 256 << 20, 32 << 20
# By which users set the same.
_VARIABLE, _TUNABLES = "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"

_holds_little = False


@dataclass(frozen=True)
class MemoryLimit:
    """So many bytes, and what sets them.

    Attributes:
        by_group: that is a control group, as containers and job schedulers make them: who takes more is killed.
    """

    nbytes: int
    source: str
    by_group: bool = True


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The least of the machine's memory, the limits of this process's control groups, of version 1 and 2, and half of
    what is left of its own limits: an arena isn't all that it maps.

    `root`: the folder in which /proc and /sys say what the process's groups are.
    """
    machine = MemoryLimit(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine's memory", by_group=False
    )
    limits = [machine, *_of_mappings()]
    for version, group in control_groups("memory", root):
        file = group / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        if file.exists() and (text := file.read_text().strip()) != "max":
            limits.append(MemoryLimit(int(text), str(file)))
    return min(limits, key=lambda limit: limit.nbytes)


def _of_mappings() -> list[MemoryLimit]:
    limits = []
    for kind, (name, counted) in _OF_MAPPINGS.items():
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(counted))
            left = max(0, limit - (int(line.split()[1]) << 10))
            limits.append(MemoryLimit(left // 2, f"{name}, of which {in_words(left)} are left", by_group=False))
    return limits


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can (glibc); elsewhere nothing happens.

    Large blocks that were freed between small ones that live on can't be reused for slightly larger requests, such as
    the aligned ones of tensors; without this, a loop that makes some of each grows by its large blocks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Trimmed:
    """Bytes that are allocated and freed before long: whenever there have been so many, freed memory is given back."""

    def __init__(self, every: int) -> None:
        self._every, self._since = every, 0

    def add(self, nbytes: int) -> None:
        self._since += nbytes
        if self._since >= self._every:
            self._since = 0
            trim_heap()


_VALUES, _RESULTS = _Trimmed(64 << 20), _Trimmed(256 << 20)


def pass_through(nbytes: int) -> None:
    """Say that a value of so many bytes is allocated and freed before long: whenever 64 MiB of such have been, freed
    memory is given back to the system."""
    _VALUES.add(nbytes)


@cache
def hold_little() -> None:
    """From now on, let this process hold at most 256 MiB of what operators of graphs computed and freed, where the C
    library can (glibc). Nothing happens where the environment says from which size on blocks go back to the system by
    themselves (MALLOC_MMAP_THRESHOLD_, or GLIBC_TUNABLES).

    What operators compute has many sizes, lies between what is saved for backward, and leaves holes there: of a 7 B
    Llama over 256 tokens, a gigabyte. Were each large block given back as it is freed, there would be none, but fresh
    pages for every result cost a tenth of the time of a step.
    """
    global _holds_little
    if _VARIABLE in os.environ or "mmap_threshold" in os.environ.get(_TUNABLES, ""):
        return
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_MMAP_THRESHOLD, _LARGE)
        option(_TRIM_THRESHOLD, _AT_THE_END)  # else 128 KiB, once the other is set
        _holds_little = True


def holds_little() -> bool:
    """Whether `computed` is to be told what operators compute."""
    return _holds_little


def computed(nbytes: int) -> None:
    """Say that an operator computed so many bytes on the CPU, of which any part may be freed by now."""
    _RESULTS.add(nbytes)
