"""Which of PyTorch's types of devices compute in host memory, and which in memory of their own."""

from __future__ import annotations

IN_HOST_MEMORY = frozenset({"cpu"})


def has_own_memory(kind: str) -> bool:
    """Whether what computes on devices of a type computes in their own memory, to which tiles are copied."""
    return kind not in IN_HOST_MEMORY
