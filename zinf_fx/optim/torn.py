"""What is known after a step that was interrupted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

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


def _count(names: tuple[str, ...]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} ({', '.join(names[:NAMES_SHOWN])}{more})"
