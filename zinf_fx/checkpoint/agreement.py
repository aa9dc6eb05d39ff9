"""Ranks save and load together: what fails on one fails on all, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from zinf_fx.config import Config
from zinf_fx.errors import CheckpointError, DamagedCheckpointError
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.local_parameter import stored_in


class _Failure(NamedTuple):
    """What failed somewhere, in words, and whether that is damage to a checkpoint."""

    message: str
    is_damage: bool


def all_ranks(*models: torch.nn.Module) -> Ranks:
    """All of torch.distributed; without it, this process alone. They wait for each other for as long as those do that
    train the first of these models that is stored."""
    stored = (one for model in models for parameter in model.parameters() for one in stored_in(parameter))
    first = next(stored, None)
    return Ranks.of(Config() if first is None else Config(collective_timeout=first.storage.config.collective_timeout))


@contextmanager
def together(what: str, *several: Ranks) -> Iterator[None]:
    """A block that all of some ranks do, each by itself; of `several` groups, each process passes its own, in the same
    order. It ends well on all of them, or on none.

    Raises: what the block raises; CheckpointError on a rank where it didn't, but on another. DamagedCheckpointError is
    raised on all ranks, or on none, so that all of them may try another checkpoint.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    failure = None
    if failed is not None:
        where = f" on rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else ""
        message = f"{what} failed{where}: {type(failed).__name__}: {failed}"
        failure = _Failure(message, isinstance(failed, DamagedCheckpointError))
    for ranks in several:
        found: list[_Failure] = [one for one in ranks.of_all(failure, what) if one is not None]
        if found:
            failure = min(found, key=lambda one: one.is_damage)  # what else failed decides
    if failure is None:
        return
    if failed is not None and failure.is_damage == isinstance(failed, DamagedCheckpointError):
        raise failed
    kind = DamagedCheckpointError if failure.is_damage else CheckpointError
    raise kind(failure.message) from failed
