"""The engine alone: the transfers of a recorded step once more, without what the step does between them.

They are asked for in the same order and through as much memory; both directions move at once, and nothing is waited for
but room. That is the limit of a step that the disk bounds.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zinf_fx.runtime.disk.store import Extent, Store, Ticket
from zinf_fx.runtime.memory.arena import Buffer
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import PAGE, blocks


@dataclass(frozen=True)
class Request:
    """One transfer that a step asked the store for."""

    write: bool
    extent: Extent
    offset: int
    nbytes: int


@dataclass
class Recording:
    """The requests that a store got, in order, and the most bytes of its host arena that were allocated at a time."""

    requests: list[Request]
    peak: int = 0


@contextlib.contextmanager
def recorded(tiers: Tiers) -> Iterator[Recording]:
    """Record what happens in the block. (The arena's own peak is that of the whole job, construction included.)"""
    store, arena, recording = tiers.store, tiers.host, Recording([])
    allocate_of_arena = arena.allocate

    def allocate(nbytes: int) -> Buffer:
        buffer = allocate_of_arena(nbytes)
        recording.peak = max(recording.peak, arena.in_use)
        return buffer

    def noting(start: Callable[..., Ticket], write: bool) -> Callable[..., Ticket]:
        def note(extent: Extent, address: int, offset: int, nbytes: int, *, owner: object = None) -> Ticket:
            recording.requests.append(Request(write, extent, offset, nbytes))
            return start(extent, address, offset, nbytes, owner=owner)

        return note

    arena.allocate, store.read, store.write = allocate, noting(store.read, False), noting(store.write, True)
    try:
        yield recording
    finally:
        del arena.allocate, store.read, store.write


class EngineAlone:
    """The requests of a step to extents of their own, through a ring of memory, and nothing else.

    All pages hold the same bytes, so that a read which overtakes a write of the same page finds what it should.
    """

    def __init__(self, store: Store, requests: Sequence[Request], memory: int) -> None:
        self._store, self._requests = store, requests
        largest = max(blocks(request.nbytes) for request in requests)
        self._memory = aligned_empty(max(blocks(memory), 2 * largest))
        self._memory.view(-1, PAGE).copy_(torch.randint(0, 256, (PAGE,), dtype=torch.uint8))
        sizes = {request.extent.generation: request.extent.nbytes for request in requests}
        self._extents = {generation: store.allocate(nbytes) for generation, nbytes in sizes.items()}
        self._move(
            dict.fromkeys((request.extent.generation, request.offset, request.nbytes, True) for request in requests)
        )

    def run(self) -> None:
        """Returns when everything is moved."""
        self._move(
            (request.extent.generation, request.offset, request.nbytes, request.write) for request in self._requests
        )

    def _move(self, requests: Iterable[tuple[int, int, int, bool]]) -> None:
        under_way: deque[tuple[Ticket, range]] = deque()
        position = 0
        for generation, offset, nbytes, write in requests:
            if position + blocks(nbytes) > len(self._memory):
                position = 0
            part = range(position, position + blocks(nbytes))
            while any(moving.start < part.stop and part.start < moving.stop for _, moving in under_way):
                under_way.popleft()[0].wait()
            start = self._store.write if write else self._store.read
            address = self._memory.data_ptr() + part.start
            under_way.append((start(self._extents[generation], address, offset, nbytes), part))
            position = part.stop
        for ticket, _ in under_way:
            ticket.wait()

    def close(self) -> None:
        """Give the extents back."""
        for extent in self._extents.values():
            self._store.free(extent)
