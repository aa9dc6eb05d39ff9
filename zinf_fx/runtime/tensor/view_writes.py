"""Writes through views of stored tensors in a graph that is being captured.

A view of a captured stored tensor is a view of its gathered value: what is written to it never reaches the store.
PyTorch counts such a write as one of the tensor that the view is of, and so it can be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_Watched = list[tuple[torch.Tensor, int]]
_WATCHED: ContextVar[_Watched | None] = ContextVar("watched", default=None)


@contextmanager
def watching() -> Iterator[_Watched]:
    """The stored tensors that are gathered in the block while a graph is captured, each with the version that it has
    unless somebody writes to a view."""
    token = _WATCHED.set(found := [])
    try:
        yield found
    finally:
        _WATCHED.reset(token)


def note_gathered(tensor: torch.Tensor) -> None:
    """Note a stored tensor, before a graph that is being captured gathers it, or a DTensor that is made of one."""
    if (watched := _WATCHED.get()) is not None:
        watched.append((tensor, tensor._version))


def note_written(tensor: torch.Tensor) -> None:
    """Note a write to a stored tensor itself, which PyTorch is about to count for all that share its counter.

    Which these are (what `detach()` gives does, what `.data` gives does not) shows when the counter is moved once more.
    """
    if watched := _WATCHED.get():
        before = [one._version for one, _ in watched]
        torch.autograd.graph.increment_version(tensor)
        for number, (one, version) in enumerate(watched):
            watched[number] = one, version + 2 * (one._version - before[number])


def is_written(watched: _Watched) -> bool:
    """Whether any of the noted tensors was written to since."""
    return any(tensor._version != version for tensor, version in watched)
