"""One optimizer step over stored parameters: chunks are read, updated and written at the same time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager

import torch
from torch.optim import Optimizer

from zinf_fx.interrupts import finalizing, held_back, let_through, sealed, taking
from zinf_fx.optim.arithmetic import borrow, step_without_hooks
from zinf_fx.optim.chunk import OpenChunk, Run, lease_scratch
from zinf_fx.optim.chunks import Piece, all_of, chunk_elements, cut, in_turn
from zinf_fx.optim.elements import moved
from zinf_fx.optim.states import MASTER, ParameterStates, State
from zinf_fx.optim.torn import TornStep
from zinf_fx.optim.whole import OpenWhole
from zinf_fx.optim.windows import OpenPiece
from zinf_fx.plan.memory.accounting import AT_A_TIME, CHUNKS_AHEAD
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.memory.freelist import round_up
from zinf_fx.runtime.memory.heap import trim_heap
from zinf_fx.runtime.recorder import RECORDER, STATES
from zinf_fx.runtime.tensor.storage import WINDOW_ALIGNMENT
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import Tiers, drain_after


class StreamedStep:
    """One step of `optimizer`, by the arithmetic of class `kind`, over the parameters that `add` is called with.

    Everything that decides the result is read at construction and in `add`. From the first `add` on, it is the
    `Background` of the parameters' tiers; `close` says that no more come. It is over when all are updated and in the
    store. Chunks are updated in the order in which their tensors were made, which is about the order in which forward
    will ask for them; of those added one by one, whatever fills a chunk is updated first.

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
    ) -> None:
        """`state`: what the optimizer shows. `stored`: where each parameter's states live. `failed` is told how a step
        failed that changed anything."""
        # Nothing here holds the optimizer: when nobody else does either, it can finish the step.
        self._kind, self._state, self._stored, self._failed = kind, state, stored, failed
        self._template = borrow(optimizer, kind, {}, [])
        self._template.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer
        self._names = [(group["params"], group.get("param_names")) for group in optimizer.param_groups]
        self._tiers: list[Tiers] = []
        self.parameters: dict[StoredTensor, None] = {}  # in the order in which they came
        self._loose: dict[Run, list[StoredTensor]] = {}  # not cut into chunks yet
        self._unopened: deque[tuple[Run, tuple[Piece[StoredTensor], ...]]] = deque()
        self._opened: deque[OpenChunk] = deque()
        self._begun: set[StoredTensor] = set()
        self._finished: set[StoredTensor] = set()
        self._pending: set[int] = set()  # keys of the storages that are not final yet
        self._elements = self._bytes_writing = self._chunk_bytes = self._chunks_opened = 0
        self._held: dict[StoredTensor, int] = {}  # bytes of gradients in memory that nobody else has
        self._scratch: dict[Device, torch.Tensor] = {}
        self._close = ExitStack()
        self._lock = threading.RLock()
        self._purpose = RECORDER.purpose("", STATES)
        self._busy = self._changes = self._behind = self._final = self._over = False
        self._overlaps = True
        self.closed = False
        self.seconds = 0.0

    def add(self, run: Run, parameter: StoredTensor, *, owned: bool = False) -> None:
        """Take over a parameter's update: the gradient is in `stored`, and with `owned`, nobody else's any more.

        Raises: StoreError when a step failed that is still under way on the same tiers; this one takes nothing then.
        """
        tiers = parameter.storage.usable_tiers()
        with taking(self._lock):
            if tiers.background is not self:
                if tiers.background is not None:
                    tiers.background.finish()
                tiers.background = self
            if tiers not in self._tiers:
                self._tiers.append(tiers)
            gradient = self._stored[parameter].gradient
            self._final |= owned
            self._overlaps &= owned or (isinstance(gradient, StoredTensor) and not gradient.views)
            # Let autograd notice at once, as after any in-place update.
            torch.autograd.graph.increment_version(parameter.whole)
            parameter.storage.bytes.announce_write()
            in_shares = self._stored[parameter].in_shares
            parameter.storage.share.stale |= in_shares and not parameter.storage.share.partitioned and not run.whole
            self._overlaps &= not (run.whole and in_shares)  # what is collective has its turn
            self._pending.update(tensor.storage.key for tensor in self._stored[parameter].touched)
            self.parameters[parameter] = None
            self._loose.setdefault(run, []).append(parameter)
            if owned and not isinstance(gradient, StoredTensor):
                self._held[parameter] = gradient.nbytes

    def make_room(self, nbytes: int, limit: int) -> None:
        """Update chunks until so many bytes more of gradients fit `limit`, or none are held."""
        with taking(self._lock):
            if not self._busy and self.bytes_held > max(limit - nbytes, 0):
                with self._working():
                    while self.bytes_held > max(limit - nbytes, 0):
                        self._update_next()

    @property
    def takes_more(self) -> bool:
        """Whether parameters came, and more may come."""
        return bool(self.parameters) and not (self.closed or self._over)

    @property
    def bytes_held(self) -> int:
        """Of gradients in memory that wait for their update."""
        return sum(self._held.values())

    @held_back
    def close(self, overlap: bool) -> None:
        """No more parameters come. With `overlap`, go on in the background where that is safe and of any use; else
        return when all is done.

        Raises: StoreError; the step is torn unless nothing was changed, and no gradient consumed.
        """
        self.closed = True
        reads = any(self._stored[p].bytes_per_element for p in self.parameters)
        if not self._can_be_continued:
            with sealed:
                self.finish()
        elif overlap and reads:
            self.advance()
            self._final = True
        else:
            self.finish()

    @held_back
    def advance(self) -> None:
        """Do what can be done without waiting."""
        if self._busy or not self._lock.acquire(blocking=False):
            return
        try:
            if self._over:
                return
            with self._working():
                if self.closed or self._loose_elements() >= self._elements:
                    self._cut_loose()
                while self._can_go_on():
                    self._update_next()
                if self.closed and not self._left and all(tiers.idle for tiers in self._tiers):
                    self._end()
        finally:
            self._lock.release()

    def settle(self, key: int) -> None:
        """Update chunks until the storage of this key is final."""
        if key in self._pending:
            with taking(self._lock):
                if not self._busy and key in self._pending:
                    with self._working():
                        while key in self._pending:
                            self._update_next()

    @held_back
    def finish(self) -> bool:
        """Update all that came so far, and wait until it is in the store.

        Raises: StoreError when that fails, or in a process made by fork, where the step is the parent's to go on with.
        """
        if self._over:
            return False
        for tiers in self._tiers:
            tiers.check_process()
        with taking(self._lock):
            if self._busy or self._over or not (self.closed or self._left):
                return False
            with self._working():
                while self._left:
                    self._update_next()
                if self.closed:
                    self._end()
                else:
                    self._wait_for_writes(0)
            return True

    @finalizing
    def finish_when_dropped(self) -> None:
        """As `finish`, for a finalizer: in a process made by fork, nothing."""
        if self._of_this_process:
            self.finish()

    @sealed
    def abandon(self, error: BaseException) -> None:
        """`error` ended what would have added more parameters: those that came are updated, the others are not."""
        if not self._of_this_process:
            return
        with taking(self._lock):
            if not self._over and not self.closed:
                self._fail(error)

    @property
    def _of_this_process(self) -> bool:
        return all(tiers.of_this_process for tiers in self._tiers)

    @property
    def _can_be_continued(self) -> bool:
        """Whether what others do to the gradients and their scale after `step()` can't harm what is left of it."""
        return self._overlaps and getattr(self._template, "grad_scale", None) is None

    @property
    def _left(self) -> bool:
        """Whether any chunk is to be updated still."""
        return bool(self._opened or self._unopened or self._loose)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Around all work: accesses to tensors are the step's own. An error ends the step; an interrupt only where it
        comes in the middle of a change. Else what comes next goes on with the step."""
        started = time.perf_counter()
        self._busy = True
        try:
            with (
                torch.inference_mode(False),  # an inference may be what goes on with the step
                torch.no_grad(),
                RECORDER.within(self._purpose or RECORDER.purpose("", STATES)),
                ExitStack() as rooms,
            ):
                for tiers in self._tiers:
                    rooms.enter_context(tiers.stepping())
                yield
        except BaseException as error:
            if isinstance(error, Exception) or self._changes or not self._can_be_continued:
                self._fail(error)
            self._final = True  # the gradients may be gone when it goes on
            raise
        finally:
            self._busy = self._changes = False
            self.seconds += time.perf_counter() - started

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around what must be done whole."""
        with sealed:
            self._changes = True
            yield
            self._changes = False

    @sealed
    def _fail(self, error: BaseException) -> None:
        self._over = True
        try:
            self._release()
        finally:
            torn = self._torn(error)
            self._leave()
            if torn is not None:
                self._failed(torn)

    def _loose_elements(self) -> int:
        return sum(
            len(elements)
            for parameters in self._loose.values()
            for parameter in parameters
            for elements in self._stored[parameter].updated
        )

    def _cut_loose(self) -> None:
        """Cut what came into chunks."""
        if not self._loose:
            return
        if not self._elements:
            states = list(self._stored.values())
            bytes_per_element = max(each.bytes_per_element for each in states)
            chunk = min(parameter.storage.config.chunk for parameter in self.parameters)
            self._elements = chunk_elements(chunk, bytes_per_element, self._tiers)
            self._bytes_writing = self._elements * max(each.bytes_written for each in states)
            self._chunk_bytes = self._elements * max(each.bytes_opened for each in states)
        chunks = []
        for run, parameters in self._loose.items():
            parameters.sort(key=lambda parameter: parameter.storage.key)
            if run.whole:
                chunks += [(run, (all_of(parameter, parameter.numel()),)) for parameter in parameters]
                continue
            shares = [(parameter, self._stored[parameter].updated) for parameter in parameters]
            chunks += [(run, pieces) for pieces in cut(shares, self._elements)]
        chunks.sort(key=lambda chunk: min(piece.parameter.storage.key for piece in chunk[1]))
        with self._changing():
            self._loose.clear()
            self._unopened += chunks

    def _can_go_on(self) -> bool:
        """Whether a chunk can be updated without waiting for reads, or for writes to make room."""
        if not self._behind or all(tiers.writing_at_most(self._bytes_writing) for tiers in self._tiers):
            self._open_ahead()
            return bool(self._opened) and self._opened[0].ready
        return False

    def _open_ahead(self) -> None:
        """Open chunks until CHUNKS_AHEAD follow the next one, when the writes before the last update's are done."""
        if self._behind:
            self._wait_for_writes(self._bytes_writing)
            self._behind = False
        while self._unopened and len(self._opened) <= CHUNKS_AHEAD:
            run, pieces = self._unopened[0]
            if run.whole and self._opened and pieces[0].count > self._elements:
                break  # what is larger than a chunk comes alone
            self._lease_scratch(run, pieces)
            scratch = self._scratch[CPU].nbytes if CPU in self._scratch else 0
            with in_turn(self._tiers, self._chunks_opened, self._chunk_bytes, behind=scratch):
                self._opened.append(OpenChunk(run, pieces, self._stored))
            self._unopened.popleft()
            self._chunks_opened += 1

    def _wait_for_writes(self, nbytes: int) -> None:
        for tiers in self._tiers:
            tiers.limit_writes(nbytes)

    def _update_next(self) -> None:
        let_through()
        if not self._opened and not self._unopened:
            self._cut_loose()
        self._open_ahead()
        chunk = self._opened[0]
        started = time.perf_counter()
        chunk.arrive()
        RECORDER.waited(started, "states")
        nbytes = chunk.states_nbytes(self._stored) if RECORDER.log is not None else 0
        with self._changing():
            self._opened.popleft()
            with closing(chunk), RECORDER.work("update", nbytes, chunk.run.place.torch_device):
                self._update(chunk, self._scratch.get(chunk.run.place))
            self._behind = True
        if chunk.run.is_first:
            trim_heap()

    def _end(self) -> None:
        for tiers in self._tiers:
            tiers.drain()
        for parameter in self.parameters:
            self._stored[parameter].flush()
        with self._changing():
            self._over = True
            self._release()
            self._leave()

    def _release(self) -> None:
        """Give back what is open."""
        self._loose.clear()
        self._unopened.clear()
        with self._close:
            for chunk in self._opened:
                self._close.callback(chunk.close)
            self._opened.clear()

    def _leave(self) -> None:
        """The step is over, well or not."""
        self._pending.clear()
        self._held.clear()
        for parameter in self.parameters:
            self._stored[parameter].gradient = None
        for tiers in self._tiers:
            if tiers.background is self:
                tiers.background = None

    def _torn(self, error: BaseException) -> TornStep | None:
        """After `error`, once the writes under way have ended: how far it got; None if nothing changed and the
        gradients are there still."""
        drain_after(error, self._tiers)
        if not self._begun and not self._final:
            return None
        updated = {p.whole for p in self._finished if self._stored[p].is_in_store()}
        concerned = [p.whole for p in (self.parameters if self.closed else self._stored)]
        return TornStep.after(error, self._names, concerned, {p.whole for p in self._begun}, updated)

    def _lease_scratch(self, run: Run, pieces: tuple[Piece[StoredTensor], ...]) -> None:
        """Memory for what a chunk has in other dtypes than that of the update, if anything."""
        if run.whole or run.place in self._scratch:
            return
        if not any(self._stored[piece.parameter].scratch_rows for piece in pieces):
            return
        every = list(self._stored.values())
        self._scratch[run.place] = lease_scratch(run.place, every, self._elements, self._tiers[0], self._close)

    def _update(self, chunk: OpenChunk, scratch: torch.Tensor | None) -> None:
        """Update a chunk, some elements at a time: on the CPU, the cache keeps what each operation leaves to the next
        of the gradient in fp32 and of the new weights."""
        for part in chunk.parts:
            part.wait()
        self._begun.update(part.piece.parameter for part in chunk.parts)
        inner = borrow(self._template, self._kind, chunk.run.group, [])
        for name in ("grad_scale", "found_inf"):  # GradScaler's, on the device of the gradients
            if name in vars(inner):
                setattr(inner, name, moved(vars(inner)[name], chunk.run.place))
        if chunk.run.whole:
            for part in chunk.parts:
                self._update_together(inner, chunk.run, (all_of(part, part.piece.count),), None)
            return
        parts = [(part, (range(part.piece.count),)) for part in chunk.parts]
        for together in cut(parts, AT_A_TIME if chunk.run.place is CPU else self._elements):
            self._update_together(inner, chunk.run, together, scratch)

    def _update_together(
        self, inner: Optimizer, run: Run, pieces: tuple[Piece[OpenPiece | OpenWhole], ...], scratch: torch.Tensor | None
    ) -> None:
        # Fused kernels count steps where they run, and the others on the CPU.
        counts_at = run.place if run.group.get("fused") else CPU
        offset = 0
        for some in pieces:
            parameter = some.parameter.piece.parameter
            tensors = self._stored[parameter].tensors
            scalars = {k: moved(v, counts_at) for k, v in self._state[parameter.whole].items() if k not in tensors}
            rows = None if scratch is None else scratch.flatten(1).view(run.dtype)[:, offset:]
            some.parameter.begin(some.elements, scalars, rows)
            offset += round_up(some.count, WINDOW_ALIGNMENT)
        inner.param_groups[0]["params"] = [some.parameter.weights for some in pieces]
        inner.state.clear()
        inner.state.update((some.parameter.weights, some.parameter.state) for some in pieces)
        step_without_hooks(inner)
        for some in pieces:
            part = some.parameter
            scalars = part.end(some.elements, inner.state[part.weights])
            if some.last:
                part.store()
                if part.piece.last:
                    self._finish(part.piece.parameter, part.names, scalars)

    def _finish(self, parameter: StoredTensor, names: Iterable[str], scalars: State) -> None:
        """All pieces are updated: show the states, and let others see the parameter."""
        states, entry = self._stored[parameter], self._state[parameter.whole]
        entry.update(scalars)
        entry.update((name, parameter.shown(states.tensors[name])) for name in names)
        if states.has_master:
            entry[MASTER] = parameter.shown(states.tensors[MASTER])
            states.version = parameter.storage.bytes.version
        self._finished.add(parameter)
        self._pending.difference_update(tensor.storage.key for tensor in self._stored[parameter].touched)
        self._held.pop(parameter, None)
        states.gradient = None
