"""Ranks see that all of them ask for the same collective before it begins, and what others do when one doesn't come.

[Note: meetings]
The collectives of graphs are compared before these run: see [Note: order]. What code outside of them asks for (the
value of a partitioned tensor, an agreement) may be asked for by one rank alone: `if rank == 0:
torch.save(model.state_dict())`. Started as it is, such a collective meets another one of the other ranks, and buffers
of different lengths end the process. So ranks meet first, in torch.distributed's store: there, what each asks for is
compared by name, and no collective is left behind in a process group when they differ.

A rank that waits for long says so in the store, with the number of collectives that it has started. One that waits in a
meeting for a rank that waits for a collective which the first has not started, waits for ever: both know it then. One
that ends, or leaves torch.distributed, says that, too. For collectives of other code, see [Note: onlooker].
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zinf_fx.errors import RanksError
from zinf_fx.runtime.onlooker import Onlooker

log = logging.getLogger("zinf_fx")

# Seconds after which a rank that waits says so, and looks what the others wait for.
PATIENCE = 1.0
_ADVICE = (
    "a collective of all ranks: each must ask for it at the same point, also where one alone uses what it gives. What "
    "saves a model on one rank gathers it there: use zinf_fx.save_checkpoint() or export_safetensors() on every rank, "
    "the Trainer of zinf_fx.integrations.transformers, or the Accelerator of zinf_fx.integrations.accelerate; else, "
    "call full_tensor() of each value of its state_dict on every rank first"
)
_ENDED = -1  # in place of the number of collectives: this rank asks for nothing any more


class Meetings:
    """Those of one group of ranks, of which this process is one."""

    def __init__(self, group: dist.ProcessGroup, name: str, timeout: timedelta) -> None:
        """`name`: the same on all ranks of the group, and of no other meetings."""
        self._store = dist.PrefixStore(f"zinf_fx/{name}", _get_default_store())
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = timeout
        self._number = 0
        self._said = False
        self._onlooker = Onlooker(self._store, self._rank)
        weakref.finalize(self, _leave, self._store, self._rank, os.getpid())
        weakref.finalize(self, self._onlooker.end)

    def meet(self, what: str, started: int) -> None:
        """Return when all ranks have come for `what`; `started` collectives have begun on this one.

        Raises: RanksError, on every rank that has come, when one comes for something else, or waits for a collective
        that is not going to begin; or when one doesn't come in time.
        """
        self._say_nothing()
        self._number += 1
        self._onlooker.arrive(self._number)
        came, asked, agreed, verdict = self._keys(self._number)
        mine = f"{what} on rank {self._rank}"
        if self._store.add(came, 1) == 1:
            self._store.set(asked, mine)
        first = self._store.get(asked).decode()
        if first.rpartition(" on rank ")[0] != what:
            self._store.set(verdict, f"ranks disagree: {first}, and {mine}. Each is {_ADVICE}")
        elif self._store.add(agreed, 1) == self._size:
            for key in self._keys(self._number - 1):  # everybody has left that one
                self._store.delete_key(key)
            self._store.set(verdict, "")
        if found := self._verdict(verdict, what, started):
            raise RanksError(found)
        self._say_nothing()

    def wait(self, work: dist.Work, what: str, number: int) -> None:
        """Return when `work` is over, which is the collective of this number on this rank.

        Raises: RanksError when it isn't going to begin on another rank; what torch.distributed raises.
        """
        self._say_nothing()
        for patience in self._patience():
            asked = time.monotonic()
            try:
                work.wait(timedelta(seconds=patience))
            except RuntimeError:
                if time.monotonic() - asked < patience - 0.01:  # it waits whole milliseconds
                    raise  # it is over, and failed
            else:
                self._say_nothing()
                return
            self._say(number, 0, what)
            for rank, (started, meeting, theirs) in self._others().items():
                if meeting and started < number:
                    found = self._deadlock(rank, theirs, f"rank {self._rank} for {what} to begin there")
                    self._store.set(self._keys(meeting)[-1], found)
                    raise RanksError(found)
        raise RanksError(unexplained(what, self._rank, self._size, self._timeout))

    def _verdict(self, key: str, what: str, started: int) -> str:
        """What the ranks find in the meeting under way: nothing wrong, or what is."""
        for patience in self._patience():
            asked = time.monotonic()
            try:
                self._store.wait([key], timedelta(seconds=patience))
                return self._store.get(key).decode()
            except RuntimeError as error:
                if time.monotonic() - asked < patience / 2:  # the store is gone
                    raise RanksError(f"{what} failed on rank {self._rank} of {self._size}: {error}") from error
            if not self._said:
                log.warning(
                    f"rank {self._rank} of {self._size} has waited {patience:g} s for the other ranks to come to "
                    f"{what}, {_ADVICE}"
                )
            self._say(started, self._number, what)
            for rank, (number, meeting, theirs) in self._others().items():
                if number == _ENDED:
                    self._store.set(key, self._alone(rank, what))
                elif not meeting and number > started:
                    self._store.set(key, self._deadlock(self._rank, what, f"rank {rank} for {theirs} to begin there"))
            if elsewhere := self._onlooker.ask():
                self._store.set(key, self._deadlock(self._rank, what, elsewhere))
        return (
            f"{what} failed on rank {self._rank} of {self._size}: the other ranks did not come to it within "
            f"collective_timeout ({self._timeout.total_seconds():g} s). It is {_ADVICE}"
        )

    def _patience(self) -> Iterator[float]:
        """Seconds to wait at a time, until the time is over. Never less than a few milliseconds: torch.distributed
        rounds to whole ones, and takes none for a wait without end."""
        end = time.monotonic() + self._timeout.total_seconds()
        while (left := end - time.monotonic()) > 0:
            yield min(PATIENCE, max(left, 0.005))

    def _keys(self, meeting: int) -> tuple[str, str, str, str]:
        """In the store: how many came, what the first came for, how many came for the same, and what is found."""
        return f"{meeting}/came", f"{meeting}/asked", f"{meeting}/agreed", f"{meeting}/verdict"

    def _say(self, number: int, meeting: int, what: str) -> None:
        """Let the others know what this rank waits for: in a meeting, after `number` collectives; or for that one."""
        self._said = True
        self._store.set(f"waits/{self._rank}", f"{number} {meeting} {what}")

    def _say_nothing(self) -> None:
        if self._said:
            self._said = False
            self._store.set(f"waits/{self._rank}", "")

    def _others(self) -> dict[int, tuple[int, int, str]]:
        """What those said who wait or have ended, by rank."""
        found = {}
        for rank in range(self._size):
            key = f"waits/{rank}"
            if rank != self._rank and self._store.check([key]) and (said := self._store.get(key).decode()):
                number, meeting, what = said.split(" ", 2)
                found[rank] = int(number), int(meeting), what
        return found

    def _alone(self, ended: int, what: str) -> str:
        return (
            f"rank {self._rank} of {self._size} waits for the others to come to {what}, and rank {ended} ended, or "
            f"left torch.distributed. The first is {_ADVICE}"
        )

    def _deadlock(self, meeting: int, what: str, other: str) -> str:
        return (
            f"ranks wait for each other: rank {meeting} of {self._size} for the others to come to {what}, and {other}. "
            f"The first is {_ADVICE}"
        )


def unexplained(what: str, rank: int, size: int, timeout: timedelta) -> str:
    """What is said of a collective that failed on a rank when nothing else is known."""
    return (
        f"{what} failed on rank {rank} of {size}: another rank ended, or does something else at this point, or took "
        f"longer than collective_timeout ({timeout.total_seconds():g} s)"
    )


def _leave(store: dist.Store, rank: int, pid: int) -> None:
    """Let the others know that this rank ends: not a process that it made by fork."""
    if os.getpid() == pid:
        with contextlib.suppress(RuntimeError):  # the store ended first
            store.set(f"waits/{rank}", f"{_ENDED} 0 ")
