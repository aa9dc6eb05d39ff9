"""Host memory that a device knows, so that it copies from and to it faster, and while it computes.

[Note: slabs]  Memory is registered with a device in slabs, at multiples of SLAB, when it is first leased: only what is
used becomes resident, and no slab is registered in part. CUDA refuses a copy that crosses the border between two
registrations, or between registered and other memory, so that copies are cut there.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from zinf_fx.sizes import round_up

log = logging.getLogger(__name__)

SLAB = 64 << 20


class Registry(Protocol):
    """What host memory is registered with."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Make memory known, which becomes resident. What went wrong, or None."""

    def unregister(self, address: int) -> None:
        """Forget memory that is about to go."""


def slabs(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """The parts (start, end) of [start, start + nbytes) that lie in one slab each."""
    end = start + nbytes
    while start < end:
        border = min(end, round_up(start + 1, SLAB))
        yield start, border
        start = border


class HostMapping(mmap.mmap):
    """A private mapping, and the slabs of it that a device knows until it goes."""

    _pid = 0  # of one that the system refused, which is never initialised

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._registry: Registry | None = None
        self._refused = False
        self._known: set[int] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def serve(self, registry: Registry) -> None:
        """What is used from now on is to be registered; with the first registry, if asked for several times."""
        self._registry = self._registry or registry

    def use(self, start: int, nbytes: int, end: int) -> None:
        """Register the slabs of [start, start + nbytes), as far as they lie before the address `end`."""
        if self._registry is None or self._refused:
            return
        with self._lock:
            for first, _ in slabs(start, nbytes):
                slab = first // SLAB * SLAB
                if slab in self._known or self._refused:
                    continue
                problem = self._registry.register(slab, min(SLAB, end - slab))
                if problem is None:
                    self._known.add(slab)
                else:
                    self._refused = True
                    log.warning("host memory can't be pinned, so copies to the device will be slow: %s", problem)

    def knows(self, address: int) -> bool:
        """Whether the slab of an address is registered."""
        return address // SLAB * SLAB in self._known

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # which is no name of the module's at exit
        if getpid() == self._pid:  # a process made by fork can't talk to the device
            for slab in self._known:
                self._registry.unregister(slab)
