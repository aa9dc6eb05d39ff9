"""One optimizer step over stored parameters: chunks are read, updated and written at the same time."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from zinf_fx.errors import StoreError
from zinf_fx.optim.arithmetic import Group, borrow, step_without_hooks
from zinf_fx.optim.chunks import Piece, cut, opened_ahead
from zinf_fx.optim.heap import trim_heap
from zinf_fx.optim.states import MASTER, ParameterStates, State
from zinf_fx.optim.torn import TornStep
from zinf_fx.optim.windows import OpenPiece
from zinf_fx.plan.accounting import CHUNKS_IN_MEMORY
from zinf_fx.runtime.freelist import round_up
from zinf_fx.runtime.storage import WINDOW_ALIGNMENT
from zinf_fx.runtime.stored_tensor import StoredTensor


@dataclass
class Run:
    """Parameters of one group with the same states present, updated in the same dtype: they may share a chunk.

    Attributes:
        names: the element-wise states.
        present: those of them, and of the master, that hold values; the torch class makes the others.
    """

    group: Group
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

    def close(self) -> None:
        """Close the windows that were not stored."""
        self._close.close()


class StreamedStep:
    """One step of `optimizer`, by the arithmetic of class `kind`, over the parameters of `runs`."""

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Optimizer],
        stored: dict[torch.Tensor, ParameterStates],
        runs: list[Run],
    ) -> None:
        """`stored`: where the states of each parameter live."""
        self._optimizer, self._kind, self._stored, self._runs = optimizer, kind, stored, runs
        self._parameters = [p for run in runs for p in run.parameters]
        self._tiers = list({id(p.storage.tiers): p.storage.tiers for p in self._parameters}.values())
        self._begun: set[StoredTensor] = set()
        self._finished: set[StoredTensor] = set()

    def run(self) -> None:
        """All of it. When this returns, everything is in the store. Raises: StoreError; then ask `torn`."""
        bytes_per_element = max(self._stored[p].bytes_per_element for p in self._parameters)
        elements = self._chunk_elements(bytes_per_element)
        chunks = ((run, pieces) for run in self._runs for pieces in cut(run.parameters, elements))
        with ExitStack() as stack:
            scratch = self._lease_scratch(elements, stack)
            opened = opened_ahead(chunks, lambda chunk: _OpenChunk(*chunk, self._stored))
            for chunk in stack.enter_context(closing(opened)):
                with closing(chunk):
                    self._update(chunk, scratch.view(chunk.run.dtype))
                if chunk.run.is_first:
                    trim_heap()
                for tiers in self._tiers:
                    tiers.limit_writes(elements * bytes_per_element)
        for tiers in self._tiers:
            tiers.drain()

    def torn(self, error: BaseException) -> TornStep | None:
        """After `run` raised `error`, and the writes under way have ended: how far it got; None if nothing changed."""
        for tiers in self._tiers:
            try:
                tiers.drain()
            except StoreError as failed:
                if str(failed) != str(error):
                    error.add_note(f"and then: {failed}")
        if not self._begun:
            return None
        updated = {p for p in self._finished if self._in_store(p)}
        names: dict[torch.Tensor, str] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            numbered = [f"parameter {position} of group {number}" for position in range(len(group["params"]))]
            names |= dict(zip(group["params"], group.get("param_names", numbered), strict=True))
        return TornStep(
            f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            tuple(names[p] for p in self._parameters if p in updated),
            tuple(names[p] for p in self._parameters if p in self._begun and p not in updated),
            tuple(names[p] for p in self._parameters if p not in self._begun),
        )

    def _chunk_elements(self, bytes_per_element: int) -> int:
        """As many as configured; fewer where the host arena has no room for CHUNKS_IN_MEMORY."""
        elements = min(p.storage.config.chunk for p in self._parameters) // torch.float32.itemsize
        room = min(tiers.host.capacity - tiers.host.in_use for tiers in self._tiers)
        elements = min(elements, room // max(CHUNKS_IN_MEMORY * bytes_per_element, 1))
        return max(elements // WINDOW_ALIGNMENT, 1) * WINDOW_ALIGNMENT

    def _lease_scratch(self, elements: int, stack: ExitStack) -> torch.Tensor:
        """Memory for a chunk's gradients in the dtype of the update, if any is in another."""
        if all(p.grad.dtype == self._stored[p].dtype for p in self._parameters):
            return torch.empty(0, dtype=torch.uint8)
        buffer = self._tiers[0].host.lease(elements * max(run.dtype.itemsize for run in self._runs))
        stack.callback(buffer.release)
        return buffer.tensor((buffer.nbytes,), torch.uint8)

    def _update(self, chunk: _OpenChunk, scratch: torch.Tensor) -> None:
        state, offset = self._optimizer.state, 0
        for part in chunk.parts:
            parameter = part.piece.parameter
            tensors = self._stored[parameter].tensors
            part.wait({k: v for k, v in state[parameter].items() if k not in tensors}, scratch[offset:])
            offset += round_up(part.piece.count, WINDOW_ALIGNMENT)
        self._begun.update(part.piece.parameter for part in chunk.parts)
        inner = borrow(self._optimizer, self._kind, chunk.run.group, [part.weights for part in chunk.parts])
        inner.state.update((part.weights, part.state) for part in chunk.parts)
        step_without_hooks(inner)
        for part in chunk.parts:
            scalars = part.store(inner.state[part.weights])
            if part.piece.last:
                self._finish(chunk.run, part.piece.parameter, scalars)

    def _finish(self, run: Run, parameter: StoredTensor, scalars: State) -> None:
        """All pieces are updated: show the states, and let autograd notice, as after any in-place update."""
        states, entry = self._stored[parameter], self._optimizer.state[parameter]
        entry.update(scalars)
        entry.update((name, states.tensors[name]) for name in run.names)
        if states.has_master:
            entry[MASTER] = states.tensors[MASTER]
            states.version = parameter.storage.version
        torch.autograd.graph.increment_version(parameter)
        self._finished.add(parameter)

    def _in_store(self, parameter: StoredTensor) -> bool:
        try:
            for tensor in (parameter, *self._stored[parameter].tensors.values()):
                tensor.storage.flush()
        except StoreError:
            return False
        return True
