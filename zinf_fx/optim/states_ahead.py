"""What the next step reads of states is read while graphs compute, where the plan has room for its chunks then.

Masters and moments are final from the end of one step on, and gradients only when backward has ended. Where the disk
is the limit, forward has most of the transfers of a step, because the optimizer's are among them, and backward leaves
the disk idle.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch

from zinf_fx.errors import StoreError
from zinf_fx.interrupts import finalizing, held_back
from zinf_fx.optim.chunk import OpenChunk
from zinf_fx.optim.chunk_memory import ChunkMemory
from zinf_fx.optim.update_batch import UpdateBatch
from zinf_fx.plan.schedule import CHUNKS
from zinf_fx.runtime.recorder import RECORDER, STATES


class StatesAhead:
    """The first chunks of the step that is expected next, opened but for their gradients.

    Whoever steps holds it; the tiers know it, and call `advance` between operators.

    Attributes:
        memory: what the chunks were opened in, for the step that takes them.
    """

    def __init__(self, batch: UpdateBatch, memory: ChunkMemory) -> None:
        """`batch`: the updates of the last step, which may come again; `memory`: of the next."""
        self.memory = memory
        self._batch, self._chunks = batch, batch.chunks(memory.elements)
        self._opened: deque[OpenChunk] = deque()
        self._lock = threading.RLock()
        self._opens = False
        self._purpose = RECORDER.purpose("", STATES)
        for tiers in memory.tiers:
            tiers.ahead = self
        self._finalizer = weakref.finalize(self, _drop, memory, self._opened)
        self._finalizer.atexit = False

    @staticmethod
    def of(batches: list[UpdateBatch], memory: ChunkMemory) -> StatesAhead | None:
        """Behind a step of these batches in `memory`; None where there is no room for its chunks all the time, or the
        batch can't come again."""
        if len(batches) != 1 or not batches[0].recurs or batches[0].is_first or memory.count == CHUNKS:
            return None
        return StatesAhead(batches[0], memory.again())

    @held_back
    def advance(self) -> None:
        """Open another chunk, if the last one is read, but not all that there is room for: one part is for others."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            number, memory = len(self._opened), self.memory
            if any(tiers.ahead is not self for tiers in memory.tiers):  # another thread has given it up, or taken it
                return
            if number == min(memory.count - 1, len(self._chunks)) or (number and not self._opened[-1].ready):
                return
            self._opens = True
            with torch.inference_mode(False), torch.no_grad(), RECORDER.within(self._purpose):
                if memory.has_room:
                    self._opened.append(memory.open(*self._chunks[number]))
        except StoreError:  # the step will find out
            self._leave()
            self._give_back()
        finally:
            self._opens = False
            self._lock.release()

    def take(self, batch: UpdateBatch) -> list[OpenChunk] | None:
        """The chunks that are open, for a step of `batch`, and `memory` with them; None where there are none of it, or
        not as they would be read now."""
        with self._lock:
            self._leave()
            self._batch.recurs = batch is self._batch
            if self._opened and self._batch.recurs and all(chunk.is_current for chunk in self._opened):
                self._finalizer.detach()
                return list(self._opened)
            self._give_back()
            return None

    def close(self) -> bool:
        """Give all memory back, because somebody else needs it. Returns whether there was any."""
        with self._lock:
            if self._opens:
                return False
            self._leave()
            return self._give_back()

    def _leave(self) -> None:
        for tiers in self.memory.tiers:
            if tiers.ahead is self:
                tiers.ahead = None

    def _give_back(self) -> bool:
        any_there = bool(self._opened)
        _drop(self.memory, self._opened)
        return any_there


@finalizing
def _drop(memory: ChunkMemory, opened: deque[OpenChunk]) -> None:
    if all(tiers.of_this_process for tiers in memory.tiers):
        memory.close(opened)
    opened.clear()
