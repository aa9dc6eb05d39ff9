"""How far a step got: what of it is over, and what is known of it after a failure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from zinf_fx.interrupts import sealed
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.torn import TornStep
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


class Progress:
    """Which parameters of one step are updated.

    Attributes:
        begun: those of which elements were updated, or may have been.
        finished: those of which all were, though maybe not in the store yet.
        pending: keys of the storages that are not final yet.
        irrevocable: whether the gradients may be gone, so that the step can't be taken again.
        changes: whether something that must be done whole is under way.
        resident: those that are updated at once (see [Note: resident updates]), if that has begun; `resident_updated`
            when it is over.
        ordinary: parameters that aren't stored, and were updated before.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._names = [(group["params"], group.get("param_names")) for group in optimizer.param_groups]
        self.begun: set[StoredTensor] = set()
        self.finished: set[StoredTensor] = set()
        self.pending: set[int] = set()
        # Bytes of gradients in memory that nobody else has, of the parameters that wait for their update; and how many
        # came and went so far, each counted by one thread at a time.
        self._held: dict[StoredTensor, int] = {}
        self._bytes_came = self._bytes_went = 0
        self.resident: Sequence[StoredTensor] = ()
        self.ordinary: Sequence[torch.Tensor] = ()
        self.irrevocable = self.changes = self.resident_updated = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around what must be done whole."""
        with sealed:
            self.changes = True
            yield
            self.changes = False

    def hold(self, parameter: StoredTensor, nbytes: int) -> None:
        """Nobody else has the parameter's gradient, of so many bytes in memory."""
        self._held[parameter] = nbytes
        self._bytes_came += nbytes

    @property
    def bytes_held(self) -> int:
        """Of gradients in memory that nobody else has, of the parameters that wait for their update."""
        return self._bytes_came - self._bytes_went

    def end(self) -> None:
        """The step is over, well or not: nothing waits for it any more."""
        self.pending.clear()
        self._held.clear()
        self._bytes_went = self._bytes_came

    def finish(self, several: Sequence[ParameterStates], touched: Iterable[int]) -> None:
        """These parameters are updated: let others see them. `touched`: keys of the storages that are final."""
        self.pending.difference_update(touched)
        for states in several:
            self.finished.add(states.parameter)
            self._bytes_went += self._held.pop(states.parameter, 0)
            states.gradient = None

    def torn(
        self, error: BaseException, stored: dict[torch.Tensor, ParameterStates], concerned: Collection[StoredTensor]
    ) -> TornStep | None:
        """After `error`, once the writes under way have ended: how far it got; None if nothing changed and the
        gradients are there still."""
        begun, finished = self.begun.union(self.resident), self.finished
        if not (begun or self.ordinary or self.irrevocable):
            return None
        if self.resident_updated:
            finished = finished.union(self.resident)
        concerned = dict.fromkeys([*self.resident, *concerned])
        updated = {p.whole for p in finished if stored[p].is_in_store()}.union(self.ordinary)
        begun = {p.whole for p in begun}.union(self.ordinary)
        return TornStep.after(error, self._names, [*self.ordinary, *(p.whole for p in concerned)], begun, updated)
