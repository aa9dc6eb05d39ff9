"""The value of a large stored tensor for code that wants its address, in memory that the system can take away.

Libraries that save a model hold the addresses of many tensors at a time. In memory of their own, these would take as
much as the model. In a file that is mapped, the system writes pages to the disk, and drops them, when it is short.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from zinf_fx.errors import StoreError
from zinf_fx.runtime.memory.buffers import octets
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.sizes import WINDOW_ALIGNMENT

SMALLEST = 1 << 20
"""Bytes of a value that is worth a file of its own."""

_PIECE = 16 << 20  # bytes


def spilled(value: StoredBytes | torch.Tensor, directory: Path) -> torch.Tensor:
    """All elements, flat, in the memory of a file without a name in `directory`, which ends with the tensor.

    Raises: StoreError where there is no room for it.
    """
    pieces = _pieces(value) if isinstance(value, StoredBytes) else [value]
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, value.nbytes)
            for piece in pieces:
                left = octets(piece)
                while left:
                    left = left[file.write(left) :]
            memory = mmap.mmap(file.fileno(), value.nbytes)
    except StoreError:
        raise
    except OSError as error:
        hint = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "no file to map"
        raise StoreError("map", directory, hint, length=value.nbytes, errno=error.errno) from error
    return torch.frombuffer(memory, dtype=value.dtype)


def _pieces(held: StoredBytes) -> Iterable[torch.Tensor]:
    """All elements in order; each piece is valid until the next is asked for."""
    each = _PIECE // held.dtype.itemsize // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT
    for start in range(0, held.count, each):
        window = held.window(start, min(each, held.count - start)).read_only()
        try:
            yield window.wait()
        finally:
            window.close()
