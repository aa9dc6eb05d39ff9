"""One optimizer step over stored parameters: chunks are read, updated and written at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from zinf_fx.errors import StoreError
from zinf_fx.optim.arithmetic import Group, borrow, step_without_hooks
from zinf_fx.optim.chunks import Piece, chunk_elements, cut, opened_ahead
from zinf_fx.optim.elements import moved
from zinf_fx.optim.states import MASTER, ParameterStates, State
from zinf_fx.optim.torn import TornStep
from zinf_fx.optim.windows import OpenPiece
from zinf_fx.runtime.device import CPU, Device
from zinf_fx.runtime.freelist import round_up
from zinf_fx.runtime.heap import trim_heap
from zinf_fx.runtime.storage import WINDOW_ALIGNMENT
from zinf_fx.runtime.stored_tensor import StoredTensor
from zinf_fx.runtime.tiers import drain_after


@dataclass
class Run:
    """Parameters of one group with the same states present, updated in one place and dtype: they may share a chunk.

    Attributes:
        place: what updates them.
        names: the element-wise states.
        present: those of them, and of the master, that hold values; the torch class makes the others.
    """

    group: Group
    place: Device
    dtype: torch.dtype
    names: tuple[str, ...]
    present: frozenset[str]
    parameters: list[StoredTensor] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether the torch class makes states, in memory of its own."""
        return not self.present.issuperset(self.names)


class _OpenChunk:
    """A chunk whose windows are open."""

    def __init__(
        self, run: Run, pieces: tuple[Piece[StoredTensor], ...], stored: dict[torch.Tensor, ParameterStates]
    ) -> None:
        self.run = run
        self.parts: list[OpenPiece] = []
        self._close = ExitStack()
        try:
            for piece in pieces:
                part = OpenPiece(piece, stored[piece.parameter], run.names, run.present)
                self.parts.append(part)
                self._close.callback(part.close)
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether all of its reads are done."""
        return all(part.ready for part in self.parts)

    def close(self) -> None:
        """Close the windows that were not stored."""
        self._close.close()


class StreamedStep:
    """One step of `optimizer`, by the arithmetic of class `kind`, over the parameters of `runs`.

    Everything that decides the result is read at construction. `start` begins it; then it is the `Background` of its
    tiers until `finish`, or until the last chunk was updated by `advance`. Chunks are updated in the order in which
    their tensors were made, which is about the order in which forward will ask for them.

    Attributes:
        seconds: for which the training waited or did the step's arithmetic.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Optimizer],
        stored: dict[torch.Tensor, ParameterStates],
        runs: list[Run],
        failed: Callable[[TornStep], None],
    ) -> None:
        """`stored`: where each parameter's states live. `failed` is told how a step failed that changed anything."""
        # Nothing here holds the optimizer: when nobody else does either, it can finish the step.
        self._kind, self._stored, self._failed = kind, stored, failed
        self._template = borrow(optimizer, kind, {}, [])
        self._template.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer
        self._names = [(group["params"], group.get("param_names")) for group in optimizer.param_groups]
        self._state = optimizer.state
        for run in runs:
            run.parameters.sort(key=lambda parameter: parameter.storage.key)
        self._runs = runs
        self._parameters = [p for run in runs for p in run.parameters]
        self._tiers = list({id(p.storage.tiers): p.storage.tiers for p in self._parameters}.values())
        self._begun: set[StoredTensor] = set()
        self._finished: set[StoredTensor] = set()
        self._pending: set[int] = set()  # keys of the storages that are not final yet
        self._close = ExitStack()
        self._lock = threading.RLock()
        self._busy = self._overlapped = self._over = False
        self.seconds = 0.0

    @property
    def can_overlap(self) -> bool:
        """Whether to go on in the background is safe, and of any use: what the step reads is in the store, where
        nobody changes it unnoticed, and there are reads to wait for."""
        gradients = [self._stored[p].gradient for p in self._parameters]
        scaled = getattr(self._template, "grad_scale", None) is not None
        streamed = any(self._stored[p].bytes_per_element for p in self._parameters)
        return streamed and not scaled and all(isinstance(g, StoredTensor) and not g.views for g in gradients)

    def start(self, overlap: bool) -> None:
        """Open the first chunks; with `overlap`, return then, else when all is done.

        Raises: StoreError when a step failed that is still under way on the same tiers; this one is not begun then.
        """
        for tiers in self._tiers:
            if tiers.background is not None:
                tiers.background.finish()
        for parameter in self._parameters:
            # Let autograd notice at once, as after any in-place update.
            torch.autograd.graph.increment_version(parameter)
            parameter.storage.announce_write()
            states = self._stored[parameter]
            stored = [t for t in (parameter, states.gradient, *states.tensors.values()) if isinstance(t, StoredTensor)]
            self._pending.update(tensor.storage.key for tensor in stored)
        with self._working():
            self._open_chunks()
        for tiers in self._tiers:
            tiers.background = self
        self._overlapped = overlap
        if not overlap:
            self.finish()

    def advance(self) -> None:
        """Update the chunks that were read meanwhile."""
        if self._busy or not self._lock.acquire(blocking=False):
            return
        try:
            if self._over:
                return
            with self._working():
                while self._next is not None and self._next.ready:
                    self._update_next()
                if self._next is None and all(tiers.idle for tiers in self._tiers):
                    self._end()
        finally:
            self._lock.release()

    def settle(self, key: int) -> None:
        """Update chunks until the storage of this key is final."""
        if key in self._pending:
            with self._lock:
                if not self._busy and key in self._pending:
                    with self._working():
                        while key in self._pending:
                            self._update_next()

    def finish(self) -> bool:
        """Update all chunks, and wait until they are in the store."""
        with self._lock:
            if self._busy or self._over:
                return False
            with self._working():
                while self._next is not None:
                    self._update_next()
                self._end()
            return True

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Around all work: accesses to tensors are the step's own. An exception ends the step."""
        started = time.perf_counter()
        self._busy = True
        try:
            with torch.no_grad():
                yield
        except BaseException as error:
            self._over = True
            self._close.close()
            torn = self._torn(error)
            self._leave()
            if torn is not None:
                self._failed(torn)
            raise
        finally:
            self._busy = False
            self.seconds += time.perf_counter() - started

    def _open_chunks(self) -> None:
        bytes_per_element = max(self._stored[p].bytes_per_element for p in self._parameters)
        chunk = min(parameter.storage.config.chunk for parameter in self._parameters)
        elements = chunk_elements(chunk, bytes_per_element, self._tiers)
        self._bytes_writing = elements * max(self._stored[p].bytes_written for p in self._parameters)
        self._scratch = self._lease_scratch(elements, self._close)
        chunks = [(run, pieces) for run in self._runs for pieces in cut(run.parameters, elements)]
        chunks.sort(key=lambda chunk: min(piece.parameter.storage.key for piece in chunk[1]))
        opened = opened_ahead(chunks, lambda chunk: _OpenChunk(*chunk, self._stored))
        self._chunks = self._close.enter_context(closing(opened))
        self._next = next(self._chunks, None)

    def _update_next(self) -> None:
        chunk = self._next
        with closing(chunk):
            self._update(chunk, self._scratch[chunk.run.place].view(chunk.run.dtype))
        if chunk.run.is_first:
            trim_heap()
        for tiers in self._tiers:
            tiers.limit_writes(self._bytes_writing)
        self._next = None
        self._next = next(self._chunks, None)

    def _end(self) -> None:
        for tiers in self._tiers:
            tiers.drain()
        for parameter in self._parameters:
            self._flush(parameter)
        self._over = True
        self._close.close()
        self._leave()

    def _leave(self) -> None:
        """The step is over, well or not."""
        self._pending.clear()
        for parameter in self._parameters:
            self._stored[parameter].gradient = None
        for tiers in self._tiers:
            if tiers.background is self:
                tiers.background = None

    def _torn(self, error: BaseException) -> TornStep | None:
        """After `error`, once the writes under way have ended: how far it got; None if nothing changed and `start`
        raises it."""
        drain_after(error, self._tiers)
        if not self._begun and not self._overlapped:
            return None
        updated = {p for p in self._finished if self._in_store(p)}
        names: dict[torch.Tensor, str] = {}
        for number, (parameters, named) in enumerate(self._names):
            numbered = [f"parameter {position} of group {number}" for position in range(len(parameters))]
            names |= dict(zip(parameters, named or numbered, strict=True))
        return TornStep(
            f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            tuple(names[p] for p in self._parameters if p in updated),
            tuple(names[p] for p in self._parameters if p in self._begun and p not in updated),
            tuple(names[p] for p in self._parameters if p not in self._begun),
        )

    def _lease_scratch(self, elements: int, stack: ExitStack) -> dict[Device, torch.Tensor]:
        """Memory for a chunk's gradients in the dtype of the update, where any is in another."""
        scratch = {run.place: torch.empty(0, dtype=torch.uint8) for run in self._runs}
        nbytes = elements * max(run.dtype.itemsize for run in self._runs)
        states = [self._stored[p] for p in self._parameters]
        for place in {each.place for each in states if each.gradient.dtype != each.dtype}:
            if place is CPU:
                buffer = self._tiers[0].host.lease(nbytes)
                stack.callback(buffer.release)
                scratch[place] = buffer.tensor((nbytes,), torch.uint8)
            else:
                scratch[place] = torch.empty(nbytes, dtype=torch.uint8, device=place.torch_device)
        return scratch

    def _update(self, chunk: _OpenChunk, scratch: torch.Tensor) -> None:
        run, state, offset = chunk.run, self._state, 0
        # Fused kernels count steps where they run, and the others on the CPU.
        counts_at = run.place if run.group.get("fused") else CPU
        for part in chunk.parts:
            parameter = part.piece.parameter
            tensors = self._stored[parameter].tensors
            scalars = {k: moved(v, counts_at) for k, v in state[parameter].items() if k not in tensors}
            part.wait(scalars, scratch[offset:])
            offset += round_up(part.piece.count, WINDOW_ALIGNMENT)
        self._begun.update(part.piece.parameter for part in chunk.parts)
        inner = borrow(self._template, self._kind, run.group, [part.weights for part in chunk.parts])
        for name in ("grad_scale", "found_inf"):  # GradScaler's, on the device of the gradients
            if name in vars(inner):
                setattr(inner, name, moved(vars(inner)[name], run.place))
        inner.state.update((part.weights, part.state) for part in chunk.parts)
        step_without_hooks(inner)
        for part in chunk.parts:
            scalars = part.store(inner.state[part.weights])
            if part.piece.last:
                self._finish(run, part.piece.parameter, scalars)

    def _finish(self, run: Run, parameter: StoredTensor, scalars: State) -> None:
        """All pieces are updated: show the states, and let others see the parameter."""
        states, entry = self._stored[parameter], self._state[parameter]
        entry.update(scalars)
        entry.update((name, states.tensors[name]) for name in run.names)
        if states.has_master:
            entry[MASTER] = states.tensors[MASTER]
            states.version = parameter.storage.version
        self._finished.add(parameter)
        for tensor in (parameter, states.gradient, *states.tensors.values()):
            if isinstance(tensor, StoredTensor):
                self._pending.discard(tensor.storage.key)
        states.gradient = None

    def _flush(self, parameter: StoredTensor) -> None:
        for tensor in (parameter, *self._stored[parameter].tensors.values()):
            tensor.storage.flush()

    def _in_store(self, parameter: StoredTensor) -> bool:
        try:
            self._flush(parameter)
        except StoreError:
            return False
        return True
