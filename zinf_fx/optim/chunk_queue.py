"""The chunks of one step, from a parameter that came until its chunk is to be updated."""

from __future__ import annotations

from collections import deque

import torch

from zinf_fx.optim.chunk import OpenChunk
from zinf_fx.optim.chunk_memory import ChunkMemory
from zinf_fx.optim.progress import Progress
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.states_ahead import StatesAhead
from zinf_fx.optim.update_batch import Chunk, UpdateBatch


class ChunkQueue:
    """Parameters that came are cut into chunks, and these opened some ahead of the update.

    Chunks are in the order in which their tensors were made, which is about the order in which forward will ask for
    them; of parameters that come one by one, whatever fills a chunk goes first.

    Attributes:
        memory: what they pass through.
        ahead: what is read for the step or, when it is over, for the next one.
        is_followed: whether another step is expected that begins with reads.
    """

    def __init__(
        self, stored: dict[torch.Tensor, ParameterStates], progress: Progress, ahead: StatesAhead | None
    ) -> None:
        """`ahead`: what was read for the step."""
        self.memory, self._progress, self.ahead = ChunkMemory(stored), progress, ahead
        self.is_followed = False
        self._read: list[OpenChunk] = []  # the first chunks, but for their gradients
        self._loose: deque[UpdateBatch] = deque()  # not cut into chunks yet; another thread may add to them
        self._came = self._went = 0  # elements that were added and cut so far, each by one thread at a time
        self._unopened: deque[Chunk] = deque()
        self._opened: deque[OpenChunk] = deque()

    def __bool__(self) -> bool:
        """Whether any chunk is to be updated still; another thread may be cutting and opening them."""
        # In the order in which they pass, each looked at once.
        return bool(self._loose) or bool(self._unopened) or bool(self._opened)

    def take_ahead(self, batch: UpdateBatch) -> None:
        """Begin with what was read for `batch`; what was read for others has the room that is needed now."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and (opened := ahead.take(batch)) is not None:
            self.memory, self._read = ahead.memory, opened
        for tiers in batch.tiers:
            if tiers.ahead is not None:
                tiers.ahead.take(batch)

    def read_ahead(self, batches: list[UpdateBatch]) -> None:
        """The step of these batches is over: have read what the next one needs of states, if that is expected."""
        self.ahead = StatesAhead.of(batches, self.memory) if self.is_followed else None

    def add(self, batch: UpdateBatch) -> None:
        """Parameters came."""
        self._loose.append(batch)
        self._came += batch.elements

    @property
    def fills_a_chunk(self) -> bool:
        """Whether the parameters that came have the elements of a chunk, or nothing says how many that are."""
        return self._came - self._went >= self.memory.elements

    @property
    def is_cut(self) -> bool:
        """Whether there are chunks to be updated."""
        return bool(self._opened or self._unopened)

    def cut(self) -> None:
        """Cut what came into chunks."""
        if not self._loose:
            return
        several = list(self._loose)
        batch = UpdateBatch.of(several)
        if not self.memory.elements:
            self.memory.plan(batch)
        chunks = batch.chunks(self.memory.elements)
        with self._progress.changing():
            self._unopened += chunks[len(self._read) :]
            read, self._read = self._read, []
            self._opened += read
            for _ in several:  # last, so that nobody finds the queue empty meanwhile
                self._loose.popleft()
            self._went += batch.elements

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
        """Open chunks as far as there is room: beside them, one is updated, and one may be written. Of those that are
        open, open the gradients first, where an interrupt or a read ahead left that to be done."""
        for chunk in self._opened:
            self.memory.open_gradients(chunk)
        while self._unopened and len(self._opened) < self.memory.count - 1 and self.memory.has_room:
            recipe, pieces = self._unopened[0]
            if recipe.whole and self._opened and pieces[0].count > self.memory.elements:
                break  # what is larger than a chunk comes alone
            self._open_next()

    def _open_next(self) -> None:
        """Open a chunk, once there is room for it."""
        self.memory.wait_for_room()
        chunk = self.memory.open(*self._unopened[0])
        self._opened.append(chunk)
        self._unopened.popleft()
        self.memory.open_gradients(chunk)

    def close(self) -> None:
        """Forget what is left, and give the memory back."""
        self._loose.clear()
        self._went = self._came
        self._unopened.clear()
        opened, self._opened = [*self._read, *self._opened], deque()
        self._read = []
        self.memory.close(opened)
