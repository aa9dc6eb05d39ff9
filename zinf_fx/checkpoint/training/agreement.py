"""Ranks save and load together: what fails on one fails on all, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zinf_fx.config import Config
from zinf_fx.errors import CheckpointError, DamagedCheckpointError
from zinf_fx.runtime.ranks import Ranks


def all_ranks() -> Ranks:
    """All of torch.distributed; without it, this process alone."""
    return Ranks.of(Config())


@contextmanager
def together(ranks: Ranks, what: str) -> Iterator[None]:
    """A block that all ranks do, each by itself. It ends well on all of them, or on none.

    Raises: what the block raises; CheckpointError on a rank where it didn't, but on another, of the same class.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    mine = (
        None if failed is None else (f"{type(failed).__name__}: {failed}", isinstance(failed, DamagedCheckpointError))
    )
    found = ranks.of_all(mine, what)
    if failed is not None:
        raise failed
    for rank, other in enumerate(found):
        if other is not None:
            message, is_damage = other
            kind = DamagedCheckpointError if is_damage else CheckpointError
            raise kind(f"{what} failed on rank {rank} of {ranks.size}: {message}")
