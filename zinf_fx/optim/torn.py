"""What is known after a step that was interrupted, and of states without values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zinf_fx.errors import OptimizerError
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
        """What `error` left of a step over `concerned`. `groups`: the optimizer's parameters, with their names if they
        have any; the others are numbered."""
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
    """No step: states are shown that have no values before they are loaded."""

    def __str__(self) -> str:
        return (
            "the optimizer's states were reserved, and have no values yet: load them (dcp.load, then set_state_dict) "
            "before stepping and saving"
        )


def check_loaded(torn: TornStep | None, entry: Mapping[str, Any]) -> None:
    """Raises: OptimizerError where states were reserved, and nothing was ever written to one of those to load."""
    for name, value in entry.items() if isinstance(torn, ReservedStates) else ():
        mine = local_part(value)
        if not isinstance(mine, StoredTensor) or mine.storage.bytes.version:
            continue
        share = mine.storage.share
        if any(share.own) if share.partitioned else mine.numel():  # this rank holds elements of it
            raise OptimizerError(
                f"the state '{name}' of a parameter of shape {tuple(mine.shape)} has no values: it was reserved, and "
                "nothing was loaded into it; call dcp.load before set_state_dict"
            )


def _count(names: tuple[str, ...]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} ({', '.join(names[:NAMES_SHOWN])}{more})"
