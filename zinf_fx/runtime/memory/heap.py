"""Memory that was allocated with malloc and freed, and that the process still holds."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can (glibc); elsewhere nothing happens.

    Large blocks that were freed between small ones that live on can't be reused for slightly larger requests, such as
    the aligned ones of tensors; without this, a loop that makes some of each grows by its large blocks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
