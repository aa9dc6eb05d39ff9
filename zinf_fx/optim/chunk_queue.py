"""The chunks of one step, from a parameter that came until its chunk is to be updated."""

from __future__ import annotations

from collections import deque

from zinf_fx.optim.batch import Batch, Chunk
from zinf_fx.optim.chunk import OpenChunk
from zinf_fx.optim.chunk_memory import ChunkMemory
from zinf_fx.optim.progress import Progress
from zinf_fx.plan.memory.accounting import CHUNKS_AHEAD


class ChunkQueue:
    """Parameters that came are cut into chunks, and these opened some ahead of the update.

    Chunks are in the order in which their tensors were made, which is about the order in which forward will ask for
    them; of parameters that come one by one, whatever fills a chunk goes first.
    """

    def __init__(self, memory: ChunkMemory, progress: Progress) -> None:
        self._memory, self._progress = memory, progress
        self._loose: deque[Batch] = deque()  # not cut into chunks yet; another thread may add to them
        self._unopened: deque[Chunk] = deque()
        self._opened: deque[OpenChunk] = deque()

    def __bool__(self) -> bool:
        """Whether any chunk is to be updated still."""
        return bool(self._opened or self._unopened or self._loose)

    def add(self, batch: Batch) -> None:
        """Parameters came."""
        self._loose.append(batch)

    @property
    def fills_a_chunk(self) -> bool:
        """Whether the parameters that came have the elements of a chunk, or nothing says how many that are."""
        return sum(batch.elements for batch in list(self._loose)) >= self._memory.elements

    @property
    def is_cut(self) -> bool:
        """Whether there are chunks to be updated."""
        return bool(self._opened or self._unopened)

    def cut(self) -> None:
        """Cut what came into chunks."""
        if not self._loose:
            return
        several = list(self._loose)
        batch = Batch.of(several)
        if not self._memory.elements:
            self._memory.plan(batch)
        chunks = batch.chunks(self._memory.elements)
        with self._progress.changing():
            for _ in several:
                self._loose.popleft()
            self._unopened += chunks

    @property
    def ready(self) -> bool:
        """Whether a chunk can be updated without waiting for reads, or for writes to make room."""
        self.open_ahead()
        return bool(self._opened) and self._opened[0].ready

    def first(self) -> OpenChunk:
        """The chunk that is next, opened; waits for writes to make room for it, if need be."""
        if not self._opened and not self._unopened:
            self.cut()
        self.open_ahead()
        if not self._opened:
            self._open_next()
        return self._opened[0]

    def take_first(self) -> None:
        """It is not in the queue any more."""
        self._opened.popleft()

    def open_ahead(self) -> None:
        """Open chunks until CHUNKS_AHEAD follow the next one, as far as there is room."""
        while self._unopened and len(self._opened) <= CHUNKS_AHEAD and self._memory.has_room:
            recipe, pieces = self._unopened[0]
            if recipe.whole and self._opened and pieces[0].count > self._memory.elements:
                break  # what is larger than a chunk comes alone
            self._open_next()

    def _open_next(self) -> None:
        """Open a chunk, once there is room for it."""
        self._memory.wait_for_room()
        recipe, pieces = self._unopened[0]
        with self._memory.turn(recipe, pieces):
            self._opened.append(OpenChunk(recipe, pieces))
        self._unopened.popleft()

    def close(self) -> None:
        """Forget what is left, and give the memory back."""
        self._loose.clear()
        self._unopened.clear()
        opened, self._opened = self._opened, deque()
        self._memory.close(opened)
