"""One optimizer step over stored parameters: chunks are read, updated and written at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from threading import RLock, get_ident

import torch
from torch.optim import Optimizer

from zinf_fx.errors import StoreError
from zinf_fx.interrupts import finalizing, held_back, let_through, sealed, taking
from zinf_fx.optim.chunk_queue import ChunkMemory, ChunkQueue, PrefetchedStates
from zinf_fx.optim.chunks import ChunkUpdate
from zinf_fx.optim.in_place import InPlaceUpdate
from zinf_fx.optim.partial_step import Progress, TornStep
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.threads import BackgroundThread, serves
from zinf_fx.optim.update_batch import UpdateBatch
from zinf_fx.runtime.memory.process import trim_heap
from zinf_fx.runtime.recorder import RECORDER, STATES, STATES_BESIDE
from zinf_fx.runtime.tensor.stored_bytes import announce_writes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import drain_after


def bytes_in_memory(gradient: torch.Tensor) -> int:
    """Return what a consumed gradient takes of host memory, or kept there as it was computed, until its update."""
    if not isinstance(gradient, StoredTensor):
        return gradient.nbytes
    return gradient.stored.bytes.nbytes if gradient.stored.tier == "host" else 0


class StreamedStep:
    """One step of `optimizer`, by the arithmetic of class `kind`, over the parameters that `add` is called with.

    Everything that decides the result is read at construction and in `add`. From the first `add` on, it is the
    `BackgroundWork` of their tiers; `close` says that no more come. It is over when all are updated and in the store.

    Attributes:
        parameters: those that were added, in order.
        closed: whether no more come.
        seconds: how long the training waited or did the step's arithmetic.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Optimizer],
        stored: dict[StoredTensor, ParameterStates],
        failed: Callable[[TornStep], None],
        ahead: PrefetchedStates | None,
        threads: int,
    ) -> None:
        """`stored` says where each parameter's states live. `failed` is told how a step failed that changed anything.
        `ahead` was read for this one. `threads`: how many PyTorch has in the thread that calls the optimizer."""
        # Nothing here holds the optimizer: when nobody else does either, it can finish the step.
        self._stored = stored
        self._failed = failed
        self._progress = Progress(optimizer)
        self._update = ChunkUpdate(optimizer, kind, self._progress)
        self._queue = ChunkQueue(stored, self._progress, ahead, threads)
        self._batches: list[UpdateBatch] = []
        self.parameters: dict[StoredTensor, ParameterStates] = {}  # in the order in which they came
        self._lock = RLock()
        self._purpose = RECORDER.purpose("", STATES)
        self._worker: int | None = None  # the thread that updates chunks
        self._beside: BackgroundThread | None = None
        self._overlaps = True  # whether what is left may go on while others train
        self._over = False
        self._failure: BaseException | None = None  # what ended it before `commit`
        self.closed = False
        self.seconds = 0.0

    def add(self, batch: UpdateBatch, *, owned: bool = False) -> None:
        """Take over updates of parameters: their gradients are in the states, and with `owned`, nobody else's any more.

        Nothing here waits for the thread beside. Raises: StoreError when a step failed that is still under way on the
        same tiers; this one takes nothing then.
        """
        for tiers in batch.tiers:
            tiers.check_process()
        self._queue.take_ahead(batch)
        for tiers in batch.tiers:
            if (background := tiers.background) not in (None, self):
                background.finish()
            tiers.background = self
            if tiers not in self._memory.tiers:
                self._memory.tiers.append(tiers)
        self._progress.irrevocable |= owned
        # Let autograd notice at once, as after any in-place update.
        torch.autograd.graph.increment_version(batch.users_parameters)
        announce_writes(batch.bytes)
        self._overlaps &= owned or batch.streams_gradients
        for group, states, _ in batch.in_shards:
            shard = states.parameter.stored.shard
            shard.stale |= not (shard.partitioned or group.kind.non_elementwise)
            self._overlaps &= not group.kind.non_elementwise  # what is collective has its turn
        self._progress.pending |= batch.touched
        self.parameters |= batch.parameters
        if owned:
            for states in batch.states:
                gradient = states.gradient
                assert gradient is not None
                if nbytes := bytes_in_memory(gradient):
                    self._progress.hold(states.parameter, nbytes)
        if batch.apart is not None and not self._batches:
            self._beside = BackgroundThread(batch.apart, self._go_on)
        self._batches.append(batch)
        self._queue.add(batch)

    def update_in_place(self, updates: Sequence[InPlaceUpdate]) -> None:
        """Update parameters that nothing has to be moved for, before the others: see [Note: in-place updates].

        Raises: StoreError when a step failed that is still under way on the same tiers; nothing is changed then.
        """
        for tiers in set().union(*(update.group.tiers for update in updates)):
            tiers.check_process()
            if (background := tiers.background) is not None:
                background.finish()
        with taking(self._lock), self._working(), self._progress.changing():
            self._progress.in_place = list(chain.from_iterable(update.batch.parameters for update in updates))
            torch.autograd.graph.increment_version(chain.from_iterable(update.batch.written for update in updates))
            for update in updates:
                nbytes = update.states_nbytes if RECORDER.log is not None else 0
                place = update.batch.place
                with RECORDER.work("update", nbytes, place.torch_device):
                    update.run(self._update.borrowed(update.options, place))
            self._progress.in_place_updated = True

    def follows(self, ordinary: Sequence[torch.Tensor]) -> None:
        """Note that ordinary parameters of the optimizer are updated already: the step can't be taken again."""
        self._progress.ordinary = ordinary

    def make_room(self, nbytes: int, limit: int) -> None:
        """Update chunks until so many bytes more of gradients fit `limit`, or none are held. What is collective has its
        turn, whatever is held: ranks hold different amounts at a time."""
        if self._overlaps:
            self._until(lambda: self.bytes_held <= max(limit - nbytes, 0))

    @property
    def takes_more(self) -> bool:
        """Whether parameters came, and more may come."""
        return bool(self.parameters) and not (self.closed or self._over)

    @property
    def bytes_held(self) -> int:
        """The bytes of gradients in memory that wait for their update."""
        return self._progress.bytes_held

    def close(self, overlap: bool) -> None:
        """Take no more parameters. With `overlap`, go on in the background where that is safe and of any use; else
        return when all is done.

        Raises: StoreError; the step is torn unless nothing was changed, and no gradient consumed.
        """
        self.closed = True
        self._queue.is_followed = overlap
        if not self._can_be_continued:
            with sealed:  # an interrupt would tear it
                self.finish()
        elif overlap and (self._beside is not None or any(batch.reads for batch in self._batches)):
            self.advance()
        else:
            self.finish()

    def commit(self) -> None:
        """Count the step as taken; the gradients may be dropped. A failure from now on leaves it torn.

        Raises: what ended it already, found by another thread; it can be taken again unless it is torn.
        """
        self._progress.irrevocable = True
        if self._failure is not None:
            with taking(self._lock):  # by then it is known how far it got
                raise self._failure

    def advance(self) -> None:
        """Do what can be done without waiting, or have it done: see [Note: beside]."""
        if self._beside is not None and self._overlaps and self._beside.wake():
            return
        if self.asks or not self._lock.acquire(blocking=False):
            return
        try:
            if self._over:
                return
            with self._working():
                if self.closed or self._queue.fills_a_chunk:
                    self._queue.cut()
                while self._queue.ready and not (self.closed and self._memory.writes_enough):
                    self._update_next()
                if self.closed and not self._queue and not any(tiers.is_writing for tiers in self._memory.tiers):
                    self._end()
        finally:
            self._lock.release()

    def _go_on(self) -> bool:
        """Update the next chunk, or end the step, in the thread beside. Returns whether there is more to do at once."""
        with self._lock:
            if self._over or not self._overlaps:
                return False
            with self._working():
                if self.closed or self._queue.fills_a_chunk:
                    self._queue.cut()
                if self._queue.is_cut:
                    self._update_next()
                elif self.closed and not self._queue:  # which may have been closed just now
                    self._end()
            return not self._over and (self.closed or self._queue.is_cut)

    def settle(self, keys: Collection[int]) -> None:
        """Update chunks until the storages of these keys are final."""
        self._until(lambda: self._progress.pending.isdisjoint(keys))

    def _until(self, is_so: Callable[[], bool]) -> None:
        """Update chunks, and end the step behind the last, until something is so; or wait until it is, where the thread
        beside is at work. Does nothing when the step itself asks."""
        while not (self.asks or is_so()):
            if self._beside is not None and self._beside.wait(is_so):
                return
            with taking(self._lock):
                if not is_so():
                    with self._working():
                        while not is_so():
                            if self._queue:
                                self._update_next()
                            else:
                                self._end()

    @held_back
    def finish(self) -> bool:
        """Update all that came so far, and wait until it is in the store.

        Raises: StoreError when that fails, or in a process made by fork, where the step is the parent's to go on with.
        """
        if self._over:
            return False
        for tiers in self._memory.tiers:
            tiers.check_process()
        # In this order: who takes the last chunk out of the queue is the worker until that is updated.
        if self.asks or not (self.closed or self._queue or self._worker is not None):
            return False
        self._until(lambda: self._over or not (self.closed or self._queue))
        with taking(self._lock):
            if not self._over:
                with self._working():
                    while self._queue:
                        self._update_next()
                    self._memory.drain()
        return True

    @finalizing
    def finish_when_dropped(self) -> None:
        """Finish for a finalizer; in a process made by fork, do nothing. What the thread beside can do is left to it,
        because a finalizer may run in the middle of a block that has a lock which the thread needs."""
        if self._over or not self._of_this_process:
            return
        self.closed = True  # who would add more is gone
        if not (self._can_be_continued and self._beside is not None and self._beside.wake()):
            self.finish()

    @sealed
    def abandon(self, error: BaseException) -> None:
        """End the step after `error` ended what would have added more parameters: those that came are updated, the
        others are not. If all came, and the disk failed somebody else, find out whether it failed this, too."""
        if not self._of_this_process:
            return
        with taking(self._lock):
            if not self._over and not self.closed:
                self._fail(error)
        if isinstance(error, StoreError):
            with suppress(StoreError):
                self.finish()  # without the lock, which the thread beside needs
        self._progress.irrevocable = True  # what is left goes on in the background
        self._failure = None

    @property
    def ahead(self) -> PrefetchedStates | None:
        """What is read of states for the step that comes next, when this one is over."""
        return self._queue.ahead

    @property
    def _memory(self) -> ChunkMemory:
        return self._queue.memory

    @property
    def asks(self) -> bool:
        """Whether it is the step itself that asks: see `BackgroundWork`."""
        worker = self._worker  # which another thread may change
        return worker is not None and (worker == get_ident() or serves(worker))

    @property
    def _of_this_process(self) -> bool:
        return all(tiers.of_this_process for tiers in self._memory.tiers)

    @property
    def _can_be_continued(self) -> bool:
        """Whether what others do to the gradients and their scale after `step()` can't harm what is left of it."""
        return self._overlaps and not self._update.unscales

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Open a block around all work, in which accesses to tensors are the step's own. An error ends the step; an
        interrupt does only where it comes in the middle of a change. Else what comes next goes on with the step."""
        started = time.perf_counter()
        is_beside = self._beside is not None and self._beside.is_this_thread
        purpose = self._purpose or RECORDER.purpose("", STATES)
        if is_beside and purpose is not None:
            purpose = replace(purpose, kinds=STATES_BESIDE)
        self._worker = get_ident()
        try:
            if self._beside is not None and self._beside.failure is not None:
                raise self._beside.failure
            with (
                torch.inference_mode(False),  # an inference may be what goes on with the step
                torch.no_grad(),
                RECORDER.within(purpose),
                ExitStack() as rooms,
            ):
                for tiers in self._memory.tiers:
                    rooms.enter_context(tiers.stepping())
                yield
        except BaseException as error:
            if is_beside:
                raise  # to whoever asks next, who ends the step
            if isinstance(error, Exception) or self._progress.changes or not self._can_be_continued:
                self._fail(error)
            self._progress.irrevocable = True  # the gradients may be gone when it goes on
            raise
        finally:
            self._worker = None
            self._progress.changes = False
            if not is_beside:
                self.seconds += time.perf_counter() - started

    @sealed
    def _fail(self, error: BaseException) -> None:
        self._worker = get_ident()  # so that what is called back here has nothing to do
        if not self._progress.irrevocable:
            self._failure = error
        concerned = self.parameters if self.closed else self._stored
        self.closed = True  # whoever steps waits until it is known how far this one got
        try:
            try:
                self._queue.close()
            finally:
                drain_after(error, self._memory.tiers)
                if torn := self._progress.torn(error, self._stored, concerned):
                    self._failed(torn)
        finally:
            self._leave()
            self._worker = None

    def _update_next(self) -> None:
        let_through()
        chunk = self._queue.first()
        started = time.perf_counter()
        chunk.arrive()
        RECORDER.waited(started, "states")
        nbytes = chunk.states_nbytes if RECORDER.log is not None else 0
        place = chunk.chunk.kind.place
        with self._progress.changing():
            self._queue.take_first()
            with closing(chunk), RECORDER.work("update", nbytes, place.torch_device):
                lanes, scratch = self._memory.lanes_at(place), self._memory.scratch_at(place)
                self._update.run(chunk, *lanes, scratch, self._memory.threads)
            self._memory.behind = True
        self._queue.open_ahead()
        if chunk.chunk.kind.is_first:
            trim_heap()

    def _end(self) -> None:
        self._memory.drain()
        for allocation in {allocation for batch in self._batches for allocation in batch.allocations}:
            allocation.settle(range(allocation.count))
        with self._progress.changing():
            self._queue.close()
            self._queue.read_ahead(self._batches)
            self._leave()

    def _leave(self) -> None:
        """Leave the tiers: the step is over, well or not."""
        self._progress.end()
        for batch in self._batches:
            batch.let_go_of_gradients()
        for tiers in self._memory.tiers:
            if tiers.background is self:
                tiers.background = None
        self._over = True  # last: who trains goes on at once where that is so, and the batches may come again
