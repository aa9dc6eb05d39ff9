"""One optimizer step over stored parameters: chunks are read, updated and written at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from threading import RLock, get_ident

import torch
from torch.optim import Optimizer

from zinf_fx.errors import StoreError
from zinf_fx.interrupts import finalizing, held_back, let_through, sealed, taking
from zinf_fx.optim.arithmetic import Group, borrow, show, step_without_hooks
from zinf_fx.optim.beside import Beside
from zinf_fx.optim.chunk import OpenChunk
from zinf_fx.optim.chunk_memory import ChunkMemory
from zinf_fx.optim.chunk_queue import ChunkQueue
from zinf_fx.optim.chunks import Piece, all_of, cut
from zinf_fx.optim.elements import moved
from zinf_fx.optim.packed import OpenPack
from zinf_fx.optim.part import OpenPart
from zinf_fx.optim.progress import Progress
from zinf_fx.optim.recipe import Recipe
from zinf_fx.optim.resident import ResidentCall
from zinf_fx.optim.states import ParameterStates, State
from zinf_fx.optim.states_ahead import StatesAhead
from zinf_fx.optim.torn import TornStep
from zinf_fx.optim.update_batch import UpdateBatch
from zinf_fx.plan.memory.accounting import AT_A_TIME
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.memory.freelist import round_up
from zinf_fx.runtime.memory.heap import trim_heap
from zinf_fx.runtime.recorder import RECORDER, STATES, STATES_BESIDE
from zinf_fx.runtime.tensor.stored_bytes import announce_writes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import drain_after
from zinf_fx.sizes import WINDOW_ALIGNMENT


class StreamedStep:
    """One step of `optimizer`, by the arithmetic of class `kind`, over the parameters that `add` is called with.

    Everything that decides the result is read at construction and in `add`. From the first `add` on, it is the
    `Background` of the parameters' tiers; `close` says that no more come. It is over when all are updated and in the
    store.

    Attributes:
        parameters: those that were added, in order.
        closed: no more come.
        seconds: for which the training waited or did the step's arithmetic.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Optimizer],
        state: dict[torch.Tensor, State],
        stored: dict[torch.Tensor, ParameterStates],
        failed: Callable[[TornStep], None],
        ahead: StatesAhead | None = None,
    ) -> None:
        """`state`: what the optimizer shows. `stored`: where each parameter's states live. `failed` is told how a step
        failed that changed anything. `ahead`: what was read for this one."""
        # Nothing here holds the optimizer: when nobody else does either, it can finish the step.
        self._kind, self._state, self._stored, self._failed = kind, state, stored, failed
        self._template = borrow(optimizer, kind, {}, [])
        self._template.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer
        self._progress = Progress(optimizer)
        self._queue = ChunkQueue(stored, self._progress, ahead)
        self._batches: list[UpdateBatch] = []
        self.parameters: dict[StoredTensor, ParameterStates] = {}  # in the order in which they came
        self._pending: set[int] = set()  # keys of the storages that are not final yet
        self._held: dict[StoredTensor, int] = {}  # bytes of gradients in memory that nobody else has
        self._lock = RLock()
        self._purpose = RECORDER.purpose("", STATES)
        self._worker: int | None = None  # the thread that updates chunks
        self._beside: Beside | None = None
        self._over, self._overlaps = False, True
        self.closed, self.seconds = False, 0.0

    @held_back
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
        torch.autograd.graph.increment_version(batch.wholes)
        announce_writes(batch.bytes)
        self._overlaps &= owned or batch.streams_gradients
        for recipe, states in batch.in_shares:
            share = states.parameter.storage.share
            share.stale |= not (share.partitioned or recipe.whole)
            self._overlaps &= not recipe.whole  # what is collective has its turn
        self._pending |= batch.touched
        self.parameters |= batch.parameters
        for states in batch.states if owned else ():
            if not isinstance(states.gradient, StoredTensor):
                self._held[states.parameter] = states.gradient.nbytes
        if batch.apart is not None and not self._batches:
            self._beside = Beside(batch.apart, self._go_on)
        self._batches.append(batch)
        self._queue.add(batch)

    def update_residents(self, calls: Sequence[ResidentCall]) -> None:
        """Update parameters that nothing has to be moved for, before the others: see [Note: resident updates].

        Raises: StoreError when a step failed that is still under way on the same tiers; nothing is changed then.
        """
        for tiers in set().union(*(call.group.tiers for call in calls)):
            tiers.check_process()
            if (background := tiers.background) is not None:
                background.finish()
        with taking(self._lock), self._working(), self._progress.changing():
            self._progress.resident = list(chain.from_iterable(call.together.parameters for call in calls))
            torch.autograd.graph.increment_version(chain.from_iterable(call.together.written for call in calls))
            for call in calls:
                nbytes = call.states_nbytes if RECORDER.log is not None else 0
                place = call.together.place
                with RECORDER.work("update", nbytes, place.torch_device):
                    call.run(self._borrowed(call.options, place))
            self._progress.resident_updated = True

    def make_room(self, nbytes: int, limit: int) -> None:
        """Update chunks until so many bytes more of gradients fit `limit`, or none are held."""
        self._until(lambda: self.bytes_held <= max(limit - nbytes, 0))

    @property
    def takes_more(self) -> bool:
        """Whether parameters came, and more may come."""
        return bool(self.parameters) and not (self.closed or self._over)

    @property
    def bytes_held(self) -> int:
        """Of gradients in memory that wait for their update."""
        return sum(list(self._held.values()))

    @held_back
    def close(self, overlap: bool) -> None:
        """No more parameters come. With `overlap`, go on in the background where that is safe and of any use; else
        return when all is done.

        Raises: StoreError; the step is torn unless nothing was changed, and no gradient consumed.
        """
        self.closed, self._queue.is_followed = True, overlap
        if not self._can_be_continued:
            sealed(self.finish)()
        elif overlap and self._beside is not None:
            self._progress.irrevocable = True
            self.advance()
        elif overlap and any(batch.reads for batch in self._batches):
            self.advance()
            self._progress.irrevocable = True
        else:
            self.finish()

    @held_back
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
        """In the thread beside: update the next chunk, or end the step. Returns whether there is more to do at once."""
        with self._lock:
            if self._over or not self._overlaps:
                return False
            with self._working():
                if self.closed or self._queue.fills_a_chunk:
                    self._queue.cut()
                if self._queue.is_cut:
                    self._update_next()
                elif self.closed:
                    self._end()
            return not self._over and (self.closed or self._queue.is_cut)

    def settle(self, keys: Collection[int]) -> None:
        """Update chunks until the storages of these keys are final."""
        self._until(lambda: self._pending.isdisjoint(keys))

    def _until(self, is_so: Callable[[], bool]) -> None:
        """Update chunks, and end the step behind the last, until something is so; or wait until it is, where the thread
        beside is at work. Nothing when the step itself asks."""
        while not (self.asks or is_so()):
            if self._beside is not None and self._beside.wait(is_so):
                return
            with taking(self._lock):
                if not is_so():
                    with self._working():
                        while not is_so():
                            self._update_next() if self._queue else self._end()

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
        """As `finish`, for a finalizer: in a process made by fork, nothing. What the thread beside can do is left to
        it, because a finalizer may run in the middle of a block that has a lock which the thread needs."""
        if self._over or not self._of_this_process:
            return
        self.closed = True  # who would add more is gone
        if not (self._can_be_continued and self._beside is not None and self._beside.wake()):
            self.finish()

    @sealed
    def abandon(self, error: BaseException) -> None:
        """`error` ended what would have added more parameters: those that came are updated, the others are not. If all
        came, and the disk failed somebody else, find out whether it failed this, too."""
        if not self._of_this_process:
            return
        with taking(self._lock):
            if not self._over and not self.closed:
                self._fail(error)
        if isinstance(error, StoreError):
            with suppress(StoreError):
                self.finish()  # without the lock, which the thread beside needs

    @property
    def ahead(self) -> StatesAhead | None:
        """What is read of states for the step that comes next, when this one is over."""
        return self._queue.ahead

    @property
    def _memory(self) -> ChunkMemory:
        return self._queue.memory

    @property
    def asks(self) -> bool:
        """Whether it is the step itself that asks: see `Background`."""
        return self._worker == get_ident()

    @property
    def _of_this_process(self) -> bool:
        return all(tiers.of_this_process for tiers in self._memory.tiers)

    @property
    def _can_be_continued(self) -> bool:
        """Whether what others do to the gradients and their scale after `step()` can't harm what is left of it."""
        return self._overlaps and not self._unscales

    @property
    def _unscales(self) -> bool:
        """Whether the arithmetic divides the gradients by a GradScaler's scale."""
        return getattr(self._template, "grad_scale", None) is not None

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Around all work: accesses to tensors are the step's own. An error ends the step; an interrupt only where it
        comes in the middle of a change. Else what comes next goes on with the step."""
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
            self._worker, self._progress.changes = None, False
            self.seconds += 0.0 if is_beside else time.perf_counter() - started

    @sealed
    def _fail(self, error: BaseException) -> None:
        self._worker = get_ident()  # so that what is called back here has nothing to do
        try:
            try:
                self._queue.close()
            finally:
                drain_after(error, self._memory.tiers)
                if torn := self._progress.torn(error, self._stored, self.parameters if self.closed else self._stored):
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
        with self._progress.changing():
            self._queue.take_first()
            with closing(chunk), RECORDER.work("update", nbytes, chunk.recipe.place.torch_device):
                self._update(chunk, self._memory.scratch_at(chunk.recipe.place))
            self._memory.behind = True
        self._queue.open_ahead()
        if chunk.recipe.is_first:
            trim_heap()

    def _end(self) -> None:
        self._memory.drain()
        for home in {home for batch in self._batches for home in batch.homes}:
            home.settle(range(home.count))
        with self._progress.changing():
            self._queue.close()
            self._queue.read_ahead(self._batches)
            self._leave()

    def _leave(self) -> None:
        """The step is over, well or not."""
        self._pending.clear()
        self._held.clear()
        for batch in self._batches:
            batch.let_go_of_gradients()
        for tiers in self._memory.tiers:
            if tiers.background is self:
                tiers.background = None
        self._over = True  # last: who trains goes on at once where that is so, and the batches may come again

    def _update(self, chunk: OpenChunk, scratch: torch.Tensor | None) -> None:
        """Update a chunk, some elements at a time: on the CPU, the cache keeps what each operation leaves to the next
        of the gradient in fp32 and of the new weights."""
        for part in chunk.parts:
            part.wait()
        self._progress.begun.update(parameter for part in chunk.parts for parameter in part.parameters)
        for pack in [part for part in chunk.parts if isinstance(part, OpenPack)]:
            pack.update(self._borrowed, self._state, scratch)
            pack.store(unscaled=self._unscales)
            for recipe, states in pack.states.updates:
                if recipe.is_first or states.has_master:
                    self._finish(states, recipe.names, {})
            self._finished(pack.states.members, pack.states.touched)
            pack.states.let_go_of_gradients()
        parts = [(part, (range(part.piece.count),)) for part in chunk.parts if isinstance(part, OpenPart)]
        inner = self._borrowed(chunk.recipe.group, chunk.recipe.place)
        if chunk.recipe.whole:
            for part, _ in parts:
                self._update_together(inner, chunk.recipe, (all_of(part, part.piece.count),), None)
            return
        for together in cut(parts, AT_A_TIME if chunk.recipe.place is CPU else self._memory.elements):
            self._update_together(inner, chunk.recipe, together, scratch)

    def _borrowed(self, group: Group, place: Device) -> Optimizer:
        """The class by the options of `group`, to run at `place`."""
        inner = borrow(self._template, self._kind, group, [])
        for name in ("grad_scale", "found_inf"):  # GradScaler's, on the device of the gradients
            if name in vars(inner):
                setattr(inner, name, moved(vars(inner)[name], place))
        return inner

    def _update_together(
        self, inner: Optimizer, recipe: Recipe, pieces: tuple[Piece[OpenPart], ...], scratch: torch.Tensor | None
    ) -> None:
        # Fused kernels count steps where they run, and the others on the CPU.
        counts_at = recipe.place if recipe.group.get("fused") else CPU
        offset = 0
        for some in pieces:
            states = some.owner.piece.owner
            entry = self._state[states.parameter.whole]
            scalars = {k: moved(v, counts_at) for k, v in entry.items() if k not in states.tensors}
            rows = None if scratch is None else scratch.flatten(1).view(recipe.dtype)[:, offset:]
            some.owner.begin(some.elements, scalars, rows)
            offset += round_up(some.count, WINDOW_ALIGNMENT)
        inner.param_groups[0]["params"] = [some.owner.weights for some in pieces]
        inner.state.clear()
        inner.state.update((some.owner.weights, some.owner.state) for some in pieces)
        step_without_hooks(inner)
        for some in pieces:
            part = some.owner
            scalars = part.end(some.elements, inner.state[part.weights])
            if some.last:
                part.store(unscaled=self._unscales)
                if part.piece.last:
                    self._finish(part.piece.owner, part.names, scalars)
                    self._finished([part.piece.owner], part.piece.owner.touched)

    def _finish(self, states: ParameterStates, names: Iterable[str], scalars: State) -> None:
        """All pieces are updated: show the states."""
        parameter = states.parameter
        show(entry := self._state[parameter.whole], scalars)
        entry.update((name, parameter.shown(states.tensors[name])) for name in names)
        if states.has_master:
            entry.update((name, parameter.shown(states.tensors[name])) for name in states.masters)
            states.version = parameter.storage.bytes.version

    def _finished(self, several: Sequence[ParameterStates], touched: Iterable[int]) -> None:
        """Let others see the parameters. `touched`: keys of the storages that are final."""
        self._pending.difference_update(touched)
        for states in several:
            self._progress.finished.add(states.parameter)
            self._held.pop(states.parameter, None)
            states.gradient = None
