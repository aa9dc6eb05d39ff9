"""Writes through views of stored tensors in a graph that is being captured.

A view of a captured stored tensor is a view of its gathered value: what is written to it never reaches the store.
PyTorch counts such a write as one of the tensor that the view is of, and so it can be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_WATCHED: ContextVar[list[tuple[torch.Tensor, int]] | None] = ContextVar("watched", default=None)


@contextmanager
def watching() -> Iterator[list[tuple[torch.Tensor, int]]]:
    """The stored tensors that are gathered in the block while a graph is captured, each with its version then."""
    token = _WATCHED.set(found := [])
    try:
        yield found
    finally:
        _WATCHED.reset(token)


def gathered(tensor: torch.Tensor) -> None:
    """Note a stored tensor, before a graph that is being captured gathers it."""
    if (watched := _WATCHED.get()) is not None:
        watched.append((tensor, tensor._version))


def is_written(watched: list[tuple[torch.Tensor, int]]) -> bool:
    """Whether any of the noted tensors was written to since."""
    return any(tensor._version != version for tensor, version in watched)
