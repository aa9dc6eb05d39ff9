"""When Python searches for cycles of references."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """A block that makes very many objects, and hardly any cycles of references: Python doesn't search for these in it.
    It would look at all objects there are, again and again, for half a second each time in a process with PyTorch's
    compiler."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
