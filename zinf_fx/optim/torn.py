"""What is known after a step that was interrupted."""

from __future__ import annotations

from dataclasses import dataclass

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


def _count(names: tuple[str, ...]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} ({', '.join(names[:NAMES_SHOWN])}{more})"
