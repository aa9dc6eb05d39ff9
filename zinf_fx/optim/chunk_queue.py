"""The chunks of one step, until they are to be updated, and the memory that they pass through.

[Note: prefetched states]
What the next step reads of states is read while graphs compute, where the plan has room for its chunks then.

Masters and moments are final from the end of one step on, and gradients only when backward has ended. Where the disk
is the limit, forward has most of the transfers of a step, because the optimizer's are among them, and backward leaves
the disk idle.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Collection
from contextlib import ExitStack

import torch

from zinf_fx.errors import StoreError
from zinf_fx.interrupts import finalizing, held_back
from zinf_fx.optim.chunks import Chunk, OpenChunk, chunk_elements, in_turn
from zinf_fx.optim.partial_step import Progress
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.threads import lanes_for, update_threads
from zinf_fx.optim.update_batch import Bytes, UpdateBatch
from zinf_fx.plan.chunks import AT_A_TIME, part_of
from zinf_fx.plan.schedule import CHUNKS
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.recorder import RECORDER, STATES
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import Tiers


class ChunkMemory:
    """Says how large chunks are, where each is opened, and which writes must end before.

    Attributes:
        tiers: the tiers that the parameters live in.
        elements: how many elements a chunk has; 0 until `plan`.
        count: how many chunks there may be at a time; CHUNKS until `plan`.
        threads: how many threads update a chunk on the CPU; until `plan`, as many as PyTorch has.
        opened: how many chunks were opened.
        behind: whether a chunk was updated since writes were waited for.
    """

    def __init__(self, stored: dict[StoredTensor, ParameterStates], threads: int) -> None:
        """`threads`: how many PyTorch has in the thread that calls the optimizer."""
        self.tiers: list[Tiers] = []
        self.threads = threads
        self.elements = self._chunk_written = self._chunk_bytes = self.opened = 0
        self.behind, self.count = False, CHUNKS
        self._stored = stored
        self._lanes = 1, 0
        self._scratch: dict[Device, torch.Tensor] = {}
        self._close = ExitStack()

    def plan(self, batch: UpdateBatch) -> None:
        """Decide how large the chunks of `batch`, and of all that may come, are: as configured, unless other room is
        planned."""
        more = len(self._stored) > len(batch.parameters)
        per_element = Bytes.of(self._stored.values()) if more else batch.bytes_per_element
        self.elements = chunk_elements(batch.chunk_bytes, per_element.all, self.tiers)
        self.count = min(tiers.chunk_count for tiers in self.tiers)
        self.threads = update_threads(batch.wanted_threads, self.threads, beside_gpu=batch.apart is not None)
        self._lanes = lanes_for(self.elements, self.threads)
        self._chunk_written = self.elements * per_element.written
        self._chunk_bytes = self.elements * per_element.opened

    def open(self, chunk: Chunk) -> OpenChunk:
        """Open the next chunk, but for its gradients."""
        place = chunk.kind.place
        if chunk.converts and place not in self._scratch:
            self._scratch[place] = self._allocate_scratch(place)
        with in_turn(self.tiers, self._next_part):
            opened = OpenChunk(chunk, self.opened)
        self.opened += 1
        return opened

    def open_gradients(self, chunk: OpenChunk) -> None:
        """Open the gradients of a chunk, as far as an interrupt left that to be done."""
        if chunk.lacks_gradients:  # else there is no room to be waited for
            with in_turn(self.tiers, self._part(chunk.number)):
                chunk.open_gradients()

    def again(self) -> ChunkMemory:
        """Return the memory of the next step, which has chunks of the same sizes."""
        memory = ChunkMemory(self._stored, self.threads)
        memory.tiers, memory.elements, memory.count = list(self.tiers), self.elements, self.count
        memory._chunk_written, memory._chunk_bytes = self._chunk_written, self._chunk_bytes
        memory._lanes = self._lanes
        return memory

    @property
    def _next_part(self) -> range:
        """The part of the planned room for chunks that the next one has."""
        return self._part(self.opened)

    def _part(self, number: int) -> range:
        scratch = self._scratch[CPU].nbytes if CPU in self._scratch else 0
        return part_of(number, self._chunk_bytes, behind=scratch, count=self.count)

    def _allocate_scratch(self, place: Device) -> torch.Tensor:
        """Allocate memory for what chunks have in other dtypes than that of the update."""
        states = self._stored.values()
        lanes, piece = self.lanes_at(place)
        count = max(lanes * piece, min(AT_A_TIME, self.elements))
        shape = (
            max(updated.scratch_rows for updated in states),
            count,
            max(updated.dtype.itemsize for updated in states),
        )
        if place is not CPU:
            return torch.empty(shape, dtype=torch.uint8, device=place.torch_device)
        nbytes = math.prod(shape)
        with self.tiers[0].stepping(range(nbytes)):  # not in the middle of a chunk's part of the room
            buffer = self.tiers[0].allocate(nbytes)
        self._close.callback(buffer.release)
        return buffer.tensor(shape, torch.uint8)

    def lanes_at(self, place: Device) -> tuple[int, int]:
        """Return how many pieces of a chunk are updated there at the same time, and how many elements each has at most:
        as it was when the sizes of chunks were decided."""
        return self._lanes if place is CPU else (1, self.elements)

    def scratch_at(self, place: Device) -> torch.Tensor | None:
        """Return the memory for what chunks there have in other dtypes, if anything."""
        return self._scratch.get(place)

    @property
    def writes_enough(self) -> bool:
        """Whether the disk has writes to do for a while, so that the next chunk can wait until it is needed: what it
        changes is read from memory until that is written."""
        nbytes = self._chunk_written
        return self.count > CHUNKS and not all(tiers.chunk_writes.at_most(nbytes) for tiers in self.tiers)

    @property
    def has_room(self) -> bool:
        """Whether the next chunk can be opened without waiting for writes."""
        few = not self._is_limited or all(tiers.writes.at_most(self._chunk_written) for tiers in self.tiers)
        return few and all(tiers.is_vacant(self._next_part) for tiers in self.tiers)

    def wait_for_room(self) -> None:
        """Wait until the writes before the last update's are done; of more chunks than CHUNKS, each waits for its part
        alone, where it is opened."""
        if self._is_limited:
            for tiers in self.tiers:
                tiers.limit_writes(self._chunk_written)
            self.behind = False

    @property
    def _is_limited(self) -> bool:
        """Whether a chunk waits for the writes of those before the last. More chunks than the least have room that is
        planned for nothing else, and each waits for what is written from its part."""
        return self.behind and self.count == CHUNKS

    def drain(self) -> None:
        """Wait for all writes. Raises: StoreError."""
        for tiers in self.tiers:
            tiers.drain()

    def close(self, chunks: Collection[OpenChunk]) -> None:
        """Close the chunks that are open, and give back what they had besides."""
        with self._close:
            self._scratch.clear()
            for chunk in chunks:
                self._close.callback(chunk.close)


class PrefetchedStates:
    """The first chunks of the step that is expected next, opened but for their gradients.

    Whoever steps holds it; the tiers know it, and call `advance` between operators.

    Attributes:
        memory: what the chunks were opened in, for the step that takes them.
    """

    def __init__(self, batch: UpdateBatch, memory: ChunkMemory) -> None:
        """`batch` has the updates of the last step, which may come again; `memory` is that of the next step."""
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
    def of(batches: list[UpdateBatch], memory: ChunkMemory) -> PrefetchedStates | None:
        """Prefetch behind a step of these batches in `memory`; None where there is no room for its chunks all the time,
        or the batch can't come again."""
        if len(batches) != 1 or not batches[0].recurs or batches[0].is_first or memory.count == CHUNKS:
            return None
        return PrefetchedStates(batches[0], memory.again())

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
                    self._opened.append(memory.open(self._chunks[number]))
        except StoreError:  # the step will find out
            self._leave()
            self._give_back()
        finally:
            self._opens = False
            self._lock.release()

    def take(self, batch: UpdateBatch) -> list[OpenChunk] | None:
        """Return the chunks that are open, for a step of `batch`, and `memory` with them; None where there are none of
        it, or not as they would be read now."""
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


class ChunkQueue:
    """Cuts parameters that came into chunks, and opens some of these ahead of the update.

    Chunks are in the order of a plan's update, in which forward will ask for their parameters; without a plan, in that
    in which these were stored. Of parameters that come one by one, whatever fills a chunk goes first.

    Attributes:
        memory: the memory that chunks pass through.
        ahead: what is read for the step or, when it is over, for the next one.
        is_followed: whether another step is expected that begins with reads.
    """

    def __init__(
        self,
        stored: dict[StoredTensor, ParameterStates],
        progress: Progress,
        ahead: PrefetchedStates | None,
        threads: int,
    ) -> None:
        """`ahead` was read for the step. `threads`: how many PyTorch has in the thread that calls the optimizer."""
        self.memory, self._progress, self.ahead = ChunkMemory(stored, threads), progress, ahead
        self.is_followed = False
        self._read: list[OpenChunk] = []  # the first chunks, but for their gradients
        self._loose: deque[UpdateBatch] = deque()  # not cut into chunks yet; another thread may add to them
        self._came = self._went = 0  # elements that were added and cut so far, each by one thread at a time
        self._unopened: deque[Chunk] = deque()
        self._opened: deque[OpenChunk] = deque()

    def __bool__(self) -> bool:
        """Whether any chunk is still to be updated; another thread may be cutting and opening them."""
        # In the order in which they pass, each looked at once.
        return bool(self._loose) or bool(self._unopened) or bool(self._opened)

    def take_ahead(self, batch: UpdateBatch) -> None:
        """Begin with what was read for `batch`; what was read for others has the room that is needed now."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and (opened := ahead.take(batch)) is not None:
            self.memory, self._read = ahead.memory, opened
        for tiers in batch.tiers:
            if isinstance(prefetched := tiers.ahead, PrefetchedStates):
                prefetched.take(batch)

    def read_ahead(self, batches: list[UpdateBatch]) -> None:
        """After the step of these batches, have read what the next one needs of states, if that is expected."""
        self.ahead = PrefetchedStates.of(batches, self.memory) if self.is_followed else None

    def add(self, batch: UpdateBatch) -> None:
        """Take the updates of parameters that came."""
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
        batches = list(self._loose)
        batch = UpdateBatch.of(batches)
        if not self.memory.elements:
            self.memory.plan(batch)
        chunks = batch.chunks(self.memory.elements)
        with self._progress.changing():
            self._unopened += chunks[len(self._read) :]
            read, self._read = self._read, []
            self._opened += read
            for _ in batches:  # last, so that nobody finds the queue empty meanwhile
                self._loose.popleft()
            self._went += batch.elements

    @property
    def ready(self) -> bool:
        """Whether a chunk can be updated without waiting for reads, or for writes to make room."""
        self.open_ahead()
        return bool(self._opened) and self._opened[0].ready

    def first(self) -> OpenChunk:
        """Return the next chunk, opened. Waits for writes to make room for it, if need be."""
        if not self._opened and not self._unopened:
            self.cut()
        self.open_ahead()
        if not self._opened:
            self._open_next()
        return self._opened[0]

    def take_first(self) -> None:
        """Remove the first chunk from the queue."""
        self._opened.popleft()

    def open_ahead(self) -> None:
        """Open chunks as far as there is room: beside them, one is updated, and one may be written. Of those that are
        open, open the gradients first, where an interrupt or a read ahead left that to be done."""
        for chunk in self._opened:
            self.memory.open_gradients(chunk)
        while self._unopened and len(self._opened) < self.memory.count - 1 and self.memory.has_room:
            chunk = self._unopened[0]
            if chunk.kind.non_elementwise and self._opened and len(chunk.slices[0].elements[0]) > self.memory.elements:
                break  # what is larger than a chunk comes alone
            self._open_next()

    def _open_next(self) -> None:
        """Open a chunk, once there is room for it."""
        self.memory.wait_for_room()
        chunk = self.memory.open(self._unopened[0])
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
