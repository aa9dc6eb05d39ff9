"""The value of a large stored tensor for code that wants its address, in memory that the system can take away.

Libraries that save a model hold the values of many tensors at a time. In memory of their own, these would take as
much as the model. In a file that is mapped, the system writes pages to the disk, and drops them, when it is short.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import torch

from zinf_fx.runtime.memory.host import memory_of_file, octets
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.sizes import pieces_of

SMALLEST = 1 << 20
"""Bytes of a value that is worth a file of its own."""


def spilled(value: StoredBytes | torch.Tensor, directory: Path) -> torch.Tensor:
    """All elements, flat, in the memory of a file without a name in `directory`, which ends with the tensor.

    Raises: StoreError where there is no room for it.
    """
    memory = memory_of_file(directory, value.nbytes)
    start = 0
    for piece in _pieces(value) if isinstance(value, StoredBytes) else [value]:
        memory[start : start + piece.nbytes] = octets(piece)
        start += piece.nbytes
    memory.madvise(mmap.MADV_DONTNEED)  # what was written is in the file
    return torch.frombuffer(memory, dtype=value.dtype)


def _pieces(held: StoredBytes) -> Iterable[torch.Tensor]:
    """All elements in order; each piece is valid until the next is asked for."""
    for part in pieces_of(range(held.count), held.dtype.itemsize):
        window = held.window(part.start, len(part)).read_only()
        try:
            yield window.wait()
        finally:
            window.close()
