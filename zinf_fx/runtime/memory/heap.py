"""Memory that was allocated with malloc and freed, and that the process still holds."""

from __future__ import annotations

import ctypes

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
    """Say that a value of so many bytes is about to be allocated, which is freed before long: whenever 64 MiB of such
    have been, freed memory is given back to the system."""
    global _since
    _since += nbytes
    if _since >= _EVERY:
        _since = 0
        trim_heap()
