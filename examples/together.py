"""The ranks that torchrun started, if it did: this process's number among them, and what only one of them is to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Together:
    """This process among those that train together; one alone without torchrun."""

    rank: int = 0
    size: int = 1


@contextmanager
def together() -> Iterator[Together]:
    """Join the other ranks for the block. All but the first print nothing."""
    if not dist.is_torchelastic_launched():
        yield Together()
        return
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if rank else sys.stdout):
            yield Together(rank, dist.get_world_size())
    finally:
        dist.destroy_process_group()
