"""Ranks that begin together agree on a name that nobody has used before, and learn each other's processes.

[Note: introduction]
The store of torch.distributed may outlive the processes that use it: torchrun keeps one for all attempts at a job. What
it has under a name that follows from the group alone may be of ranks that are dead. So each rank says hello with a
token of its own. The first one collects the hellos, and repeats the list, under a name of its own, whenever one has
changed. A rank that finds its own token in the list knows that the name is of this attempt, and says under it that it
came. When all have come, the list is right.
"""

from __future__ import annotations

import json
import os
import secrets

import torch.distributed as dist

from zinf_fx.errors import RanksError
from zinf_fx.runtime.presence import Process
from zinf_fx.runtime.waiting import polling


def introduced(store: dist.Store, rank: int, size: int, timeout: float) -> tuple[str, list[Process]]:
    """A name that is new in the store and the same on all ranks, and their processes, in order. All of the ranks call
    this. `store`: of this group's name.

    Raises: RanksError when the others don't come in time.
    """
    mine = json.dumps([secrets.token_hex(8), Process.of(os.getpid())])
    store.set(f"hello/{rank}", mine)
    name, welcomed, came = secrets.token_hex(8) if rank == 0 else "", None, False
    for _ in polling(timeout):
        if rank == 0 and not _all_came(store, name, size):
            hellos = _texts(store, [f"hello/{other}" for other in range(size)])
            if hellos is not None and hellos != welcomed:
                store.set("welcome", json.dumps([name, hellos]))
                welcomed = hellos
        found = _texts(store, ["welcome"])
        offered, hellos = json.loads(found[0]) if found else ("", [])
        if not came and len(hellos) == size and hellos[rank] == mine:
            name, came = offered, True
            store.set(f"{name}/came/{rank}", "")
            store.add(f"{name}/came", 1)
        if came and _all_came(store, name, size):
            (found,) = _texts(store, ["welcome"])
            return name, [Process(*json.loads(hello)[1]) for hello in json.loads(found)[1]]
    absent = [other for other in range(size) if other != rank and not (name and store.check([f"{name}/came/{other}"]))]
    who = f"rank(s) {', '.join(map(str, absent))}" if name else "rank 0, or another one,"
    raise RanksError(
        f"rank {rank} of {size} began to work with the others of its process group, as offload() and checkpoints do, "
        f"and {who} did not come within collective_timeout ({timeout:g} s): all ranks of a group call these at the "
        "same point"
    )


def _all_came(store: dist.Store, name: str, size: int) -> bool:
    return store.add(f"{name}/came", 0) == size


def _texts(store: dist.Store, keys: list[str]) -> list[str] | None:
    """What the store has under some keys; None: not all are there."""
    return [store.get(key).decode() for key in keys] if store.check(keys) else None
