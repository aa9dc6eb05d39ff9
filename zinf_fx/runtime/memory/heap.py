"""Memory that was allocated with malloc and freed, and that the process still holds."""

from __future__ import annotations

import ctypes
import os
from functools import cache

# The options of mallopt(3), and what `return_large_blocks` sets them to, in bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_AT_THE_END, _LARGE = 16 << 20, 1 << 20
# By which users set the same.
_VARIABLE, _TUNABLES = "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"

_EVERY = 64 << 20
_since = 0  # bytes of values since the last time


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can (glibc); elsewhere nothing happens.

    Large blocks that were freed between small ones that live on can't be reused for slightly larger requests, such as
    the aligned ones of tensors; without this, a loop that makes some of each grows by its large blocks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def pass_through(nbytes: int) -> None:
    """Say that a value of so many bytes is allocated and freed before long: whenever 64 MiB of such have been, freed
    memory is given back to the system."""
    global _since
    _since += nbytes
    if _since >= _EVERY:
        _since = 0
        trim_heap()


@cache
def return_large_blocks() -> None:
    """Let malloc take each block of 1 MiB or more from the system by itself, and give it back as soon as it is freed,
    in this process from now on, where the C library can (glibc). Nothing happens where the environment says how large
    such blocks are (MALLOC_MMAP_THRESHOLD_, or GLIBC_TUNABLES).

    By itself, glibc raises that size up to 32 MiB as such blocks are freed. What operators compute has many sizes, then
    lies between what is saved for backward, and leaves holes there: of a 7 B Llama over 256 tokens, a gigabyte.
    """
    if _VARIABLE in os.environ or "mmap_threshold" in os.environ.get(_TUNABLES, ""):
        return
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_MMAP_THRESHOLD, _LARGE)
        option(_TRIM_THRESHOLD, _AT_THE_END)  # which would no longer follow the other, and be 128 KiB
