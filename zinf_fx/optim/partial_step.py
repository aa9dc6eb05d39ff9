"""How far a step got, what is known of it after a failure, and of states without values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.errors import OptimizerError
from zinf_fx.interrupts import sealed
from zinf_fx.optim.states import ParameterStates
from zinf_fx.runtime.tensor.local_parameter import local_part
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

NAMES_SHOWN = 8


@dataclass(frozen=True)
class TornStep:
    """Names of the parameters with gradients, by how far an interrupted step got.

    Attributes:
        cause: what interrupted it.
        updated: the update is complete, and in the store.
        partial: some elements, or some of their states, may be updated and others not.
        untouched: as before the step.
    """

    cause: str
    updated: tuple[str, ...]
    partial: tuple[str, ...]
    untouched: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"an optimizer step was interrupted ({self.cause}): {_count(self.updated)} updated, "
            f"{_count(self.partial)} updated in part, {_count(self.untouched)} not; load the model's parameters and "
            "the optimizer's state_dict from a checkpoint before going on"
        )

    @staticmethod
    def after(
        error: BaseException,
        groups: Sequence[tuple[Sequence[torch.Tensor], Sequence[str] | None]],
        concerned: Sequence[torch.Tensor],
        begun: Collection[torch.Tensor],
        updated: Collection[torch.Tensor],
    ) -> TornStep:
        """Say what `error` left of a step over `concerned`. `groups` has the optimizer's parameters, with their names
        if they have any; the others are numbered."""
        names: dict[torch.Tensor, str] = {}
        for number, (parameters, named) in enumerate(groups):
            numbered = [f"parameter {position} of group {number}" for position in range(len(parameters))]
            names |= dict(zip(parameters, named or numbered, strict=True))
        return TornStep(
            f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            tuple(names[p] for p in concerned if p in updated),
            tuple(names[p] for p in concerned if p in begun and p not in updated),
            tuple(names[p] for p in concerned if p not in begun),
        )


@dataclass(frozen=True)
class ReservedStates(TornStep):
    """Says that no step was interrupted: states are shown that have no values before they are loaded."""

    def __str__(self) -> str:
        return (
            "the optimizer's states were reserved, and have no values yet: load them (dcp.load, then set_state_dict) "
            "before stepping and saving"
        )


def check_loaded(torn: TornStep | None, entry: Mapping[str, Any]) -> None:
    """Raises: OptimizerError where states were reserved, and nothing was ever written to one of those to load."""
    for name, value in entry.items() if isinstance(torn, ReservedStates) else ():
        mine = local_part(value)
        if not isinstance(mine, StoredTensor) or mine.stored.bytes.version:
            continue
        shard = mine.stored.shard
        if any(shard.own) if shard.partitioned else mine.numel():  # this rank holds elements of it
            raise OptimizerError(
                f"the state '{name}' of a parameter of shape {tuple(mine.shape)} has no values: it was reserved, and "
                "nothing was loaded into it; call dcp.load before set_state_dict"
            )


def _count(names: tuple[str, ...]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} ({', '.join(names[:NAMES_SHOWN])}{more})"


class Progress:
    """Which parameters of one step are updated.

    Attributes:
        begun: the parameters of which elements were updated, or may have been.
        finished: the parameters of which all elements were, though maybe not in the store yet.
        pending: the keys of the storages that are not final yet.
        irrevocable: whether the gradients may be gone, so that the step can't be taken again.
        changes: whether something that must be done whole is under way.
        in_place: the parameters that are updated at once (see [Note: in-place updates]), if that has begun;
            `in_place_updated` says whether it is over.
        ordinary: the parameters that aren't stored, and were updated before.
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
        self.in_place: Sequence[StoredTensor] = ()
        self.ordinary: Sequence[torch.Tensor] = ()
        self.irrevocable = self.changes = self.in_place_updated = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Open a block around what must be done whole."""
        with sealed:
            self.changes = True
            yield
            self.changes = False

    def hold(self, parameter: StoredTensor, nbytes: int) -> None:
        """Note that nobody else has the parameter's gradient, of so many bytes in memory."""
        self._held[parameter] = nbytes
        self._bytes_came += nbytes

    @property
    def bytes_held(self) -> int:
        """The bytes of gradients in memory that nobody else has, of the parameters that wait for their update."""
        return self._bytes_came - self._bytes_went

    def end(self) -> None:
        """Let nothing wait for the step any more: it is over, well or not."""
        self.pending.clear()
        self._held.clear()
        self._bytes_went = self._bytes_came

    def finish(self, parameters: Mapping[StoredTensor, ParameterStates], touched: Iterable[int]) -> None:
        """Let others see these parameters, which are updated. `touched` are the keys of the storages that are final."""
        self.pending.difference_update(touched)
        self.finished.update(parameters)
        for states in parameters.values():
            states.gradient = None
            if self._held:
                self._bytes_went += self._held.pop(states.parameter, 0)

    def torn(
        self, error: BaseException, stored: dict[StoredTensor, ParameterStates], concerned: Collection[StoredTensor]
    ) -> TornStep | None:
        """Say how far the step got before `error`, once the writes under way have ended; None if nothing changed and
        the gradients are there still."""
        begun, finished = self.begun.union(self.in_place), self.finished
        if not (begun or self.ordinary or self.irrevocable):
            return None
        if self.in_place_updated:
            finished = finished.union(self.in_place)
        concerned = dict.fromkeys([*self.in_place, *concerned])
        updated = {p.whole for p in finished if stored[p].is_in_store()}.union(self.ordinary)
        begun = {p.whole for p in begun}.union(self.ordinary)
        return TornStep.after(error, self._names, [*self.ordinary, *(p.whole for p in concerned)], begun, updated)
