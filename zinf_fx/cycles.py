"""When Python searches for cycles of references."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.utils import counters
from torch._guards import TracingContext

_captures_before = 0


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


@torch._disable_dynamo  # which is called by eager code between two graphs
def collect_given_up_captures() -> None:
    """Collect cycles of references if Dynamo has tried to capture a frame since this was called last.

    A capture that Dynamo gives up leaves weak references to parameters in such cycles, and PyTorch swaps no tensor that
    has weak references: neither `Module.to` nor a parametrization could be applied.
    """
    global _captures_before
    captures = counters["frames"]["total"]
    if captures != _captures_before and TracingContext.try_get() is None:
        _captures_before = captures
        gc.collect()
