"""Ranks see that all of them ask for the same collective before it begins, and what others do when one doesn't come.

[Note: rendezvous]
The collectives of graphs are compared before these run: see [Note: order]. What code outside of them asks for (the
value of a partitioned tensor, an agreement) may be asked for by one rank alone: `if rank == 0:
torch.save(model.state_dict())`. Started as it is, such a collective meets another one of the other ranks, and buffers
of different lengths end the process. So ranks meet first, in torch.distributed's store: there, what each asks for is
compared by name, and no collective is left behind in a process group when they differ.

A rank that waits for long, in a rendezvous or for a collective, says so in the store ([Note: deadlocks]). Where two
wait for each other, they would for ever: whoever finds that out leaves a verdict at the point where each of them waits,
for all that wait there. So does one that finds that a rank has ended ([Note: ranks that ended]). For collectives of
other code, see [Note: watchdog].

[Note: names in the store]
The store of torch.distributed may outlive the processes that use it: torchrun keeps one for all attempts at a job. What
it has under a name that follows from the group alone may be of ranks that are dead. So each rank says hello with a
token of its own. The first one collects the hellos, and repeats the list, under a name of its own, whenever one has
changed. A rank that finds its own token in the list knows that the name is of this attempt, and says under it that it
came. When all have come, the list is right.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zinf_fx.errors import RanksError
from zinf_fx.runtime.waiting import Waiting, polling
from zinf_fx.runtime.watchdog import CallSequence, Process, WaitPoint, Waits, Watchdog

log = logging.getLogger("zinf_fx")

# Seconds after which a rank that waits says so, and looks what the others wait for.
PATIENCE = 1.0
_ADVICE = (
    "a collective of all ranks: each must ask for it at the same point, also where one alone uses what it gives. What "
    "saves a model on one rank gathers it there: use zinf_fx.save_checkpoint() or export_safetensors() on every rank, "
    "the Trainer of zinf_fx.integrations.transformers, or the Accelerator of zinf_fx.integrations.accelerate; else, "
    "call full_tensor() of each value of its state_dict on every rank first"
)
_LONGER = timedelta(hours=1)  # than any wait of ours, for those of gloo
_FINE = "fine"  # the verdict of a rendezvous that all have come to


class Rendezvous:
    """Where the ranks of a group, of which this process is one, meet; and the collectives that they begin."""

    _waits: ClassVar[Waits] = Waits()  # of this process, in all groups
    known: ClassVar[dict[dist.ProcessGroup, Rendezvous]] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float) -> Rendezvous:
        """Return the rendezvous of a group. All of its ranks call this, for the first time at the same point. Raises:
        RanksError when one doesn't, for `timeout` seconds."""
        known = cls.known.get(group)
        if known is None:
            known = cls.known[group] = cls(group, timeout)
        return known

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        store = dist.PrefixStore("zinf_fx", _get_default_store())
        self._members = dist.get_process_group_ranks(group)
        self._rank, self._size = dist.get_rank(group), len(self._members)
        of_this_name = dist.PrefixStore(group.group_name, store)
        name, processes = agree_on_name(of_this_name, self._rank, self._size, timeout)
        self._store, of_this_attempt = store, dist.PrefixStore(name, store)
        self._met = self._waits.sequence(f"{name}/met", True)
        self._begun = self._waits.sequence(f"{name}/begun", False)
        self._exchanged = self._waits.sequence(f"{name}/exchanged", False)  # by connections of their own
        self._watchdog = Watchdog(of_this_attempt, self._rank, processes)
        self._connections = dist.PrefixStore("connections", of_this_attempt)
        self._agreement: dist.ProcessGroupGloo | None = None
        self._warned = False  # of the rendezvous under way
        self._watchdog.start()
        weakref.finalize(self, self._watchdog.end)

    def meet(self, what: str, timeout: float) -> None:
        """Return when all ranks have come for `what`.

        Raises: RanksError, on every rank that has come, when one comes for something else, waits for what another one
        won't begin, or has ended; or when one doesn't come within `timeout` seconds.
        """
        self._met.number += 1
        number = self._met.number
        self._warned = False
        self._watchdog.arrive(number)
        asked, agreed, key = self._keys(number)
        mine = f"{what} on rank {self._rank}"
        with self.naming(what, timeout):
            first = self._store.compare_set(asked, "", mine).decode()
            if first.rpartition(" on rank ")[0] != what:
                verdict = self._decide(key, f"ranks disagree: {first}, and {mine}. Each is {_ADVICE}")
            elif self._store.add(agreed, 1) == self._size:
                verdict = self._decide(key, _FINE)
                for left in self._keys(number - 1):  # by everybody
                    self._store.delete_key(left)
            else:
                self._wait(lambda seconds: self._is_decided(key, seconds), self._met, number, what, timeout)
                return
        if verdict != _FINE:
            raise RanksError(verdict)

    def begin(self, what: str) -> int:
        """Return the number that a collective which begins in the group has on all ranks.

        Raises: RanksError after one that failed. This rank and others may have begun different ones since, and those
        that are met by another one give wrong values, or end the process.
        """
        return self._next(self._begun, what)

    def _next(self, sequence: CallSequence, what: str) -> int:
        if sequence.failed:
            raise RanksError(
                f"{what} was refused on rank {self._rank} of {self._size}: an earlier collective of the process group "
                "failed, and the ranks' collectives don't match any more. End all ranks, and resume from a checkpoint. "
                f"What failed: {sequence.failed}"
            )
        sequence.number += 1
        return sequence.number

    def wait(self, work: dist.Work, what: str, number: int, timeout: float) -> None:
        """Return when `work` is over, which is the collective of this number.

        Raises: RanksError when it isn't going to begin on another rank, or one has ended, or after `timeout` seconds;
        what torch.distributed raises.
        """
        self._wait_for(work, self._begun, number, what, timeout)

    def _wait_for(self, work: dist.Work, sequence: CallSequence, number: int, what: str, timeout: float) -> None:
        with self.naming(what, timeout):
            try:
                if work.is_completed():
                    work.wait()
                elif number <= sequence.given_up:
                    why = sequence.failed or "an earlier wait of this rank was interrupted"
                    raise RanksError(f"{what} was given up on rank {self._rank} of {self._size}: {why}")
                else:
                    with Waiting.for_work(work) as waiting:
                        self._wait(waiting.over, sequence, number, what, timeout)
            except BaseException as error:
                sequence.given_up = sequence.number
                if isinstance(error, Exception):
                    sequence.failed = sequence.failed or str(error)
                raise

    def exchange(self, value: Any, what: str, timeout: float) -> list[Any]:
        """Return the `value` of each rank. Raises: RanksError, on every rank, when one does not come for it."""
        self.meet(what, timeout)
        with self.naming(what, timeout):
            mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            sizes = [int(size) for size in self._gathered(torch.tensor([mine.numel()]), what, timeout)]
            room = torch.zeros(max(sizes), dtype=torch.uint8)
            room[: mine.numel()] = mine
            pickled = self._gathered(room, what, timeout)
        return [pickle.loads(octets[:size].numpy().tobytes()) for octets, size in zip(pickled, sizes, strict=True)]

    def compare(self, numbers: Sequence[int], what: str, timeout: float) -> list[bool]:
        """Return whether each of the numbers is the same on all ranks, as one collective, without a rendezvous before
        it. Raises: RanksError, as `wait`."""
        with self.naming(what, timeout):
            by_rank = torch.stack(self._gathered(torch.tensor(numbers), what, timeout))
        return (by_rank == by_rank[0]).all(0).tolist()

    def _gathered(self, mine: torch.Tensor, what: str, timeout: float) -> list[torch.Tensor]:
        """Return the tensor that each rank gives. They travel by connections of their own: those of the group may be
        busy with what has failed, and its backend may have no collectives in host memory."""
        if self._agreement is None:
            self._agreement = self._connected(what, timeout)
        number = self._next(self._exchanged, what)
        room = [torch.empty_like(mine) for _ in range(self._size)]
        work = self._agreement.allgather([room], [mine])  # pyright: ignore[reportAttributeAccessIssue]  (not in stubs)
        self._wait_for(work, self._exchanged, number, what, timeout)
        return room

    def _connected(self, what: str, timeout: float) -> dist.ProcessGroupGloo:
        """Connect the ranks under the name of this rendezvous: what a group of torch.distributed finds under its own
        may be of ranks that are dead."""
        made: list[dist.ProcessGroupGloo] = []
        arguments = self._connections, self._rank, self._size, _LONGER
        number = self._next(self._exchanged, what)
        with Waiting(lambda: made.append(dist.ProcessGroupGloo(*arguments)) is None) as waiting:
            self._wait(waiting.over, self._exchanged, number, what, timeout)
        return made.pop()

    def _wait(
        self, over: Callable[[float], bool], sequence: CallSequence, number: int, what: str, timeout: float
    ) -> None:
        """Return when `over`, which waits for so many seconds at most, says so, and no verdict is against it. Raises:
        what it raises; RanksError."""
        end, key, ended = time.monotonic() + timeout, _verdict_at(sequence.name, number), []
        try:
            while (left := end - time.monotonic()) > 0:
                if over(min(PATIENCE, left)):
                    verdict = self._store.get(key).decode() if sequence.is_rendezvous else _FINE
                    break
                before, ended = ended, self._watchdog.ended()
                # What one has sent before it ended may be on its way.
                gone = ended if sequence.is_rendezvous else [rank for rank in ended if rank in before]
                if reason := self._trouble(sequence, number, what, gone):
                    verdict = self._decide(key, reason)
                    break
            else:
                verdict = self._decide(key, self._late(sequence, what, timeout))
        except BaseException as error:  # an interrupt, too: this rank does not wait any more
            failed = f"{what} failed on rank {self._rank} of {self._size}: {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # the store ended first
                self._decide(key, failed)
            raise
        finally:
            with contextlib.suppress(RuntimeError):  # the store ended first
                self._waits.withdraw()
        if verdict != _FINE:
            raise RanksError(verdict)

    def _trouble(self, sequence: CallSequence, number: int, what: str, ended: list[int]) -> str:
        """Return why a rank that waits here will wait for ever; or nothing."""
        key = _verdict_at(sequence.name, number)
        if self._store.check([key]):
            return self._store.get(key).decode()
        if ended and sequence.is_rendezvous:
            return (
                f"rank {self._rank} of {self._size} waits for the others to come to {what}, and {_named(ended)} ended, "
                f"or left torch.distributed. The first is {_ADVICE}"
            )
        if ended:
            return self._failed(what, ended)
        if sequence.is_rendezvous and not self._warned:
            self._warned = True
            log.warning(
                f"rank {self._rank} of {self._size} has waited {PATIENCE:g} s for the other ranks to come to {what}, "
                f"{_ADVICE}"
            )
        mine = WaitPoint(sequence.name, number, what, sequence.is_rendezvous, self._waits.numbers())
        if not self._waits.publish(self._store, self._members[self._rank], mine):
            return ""
        peers = {rank: member for rank, member in enumerate(self._members) if rank != self._rank}
        if theirs := self._waits.deadlock(self._store, mine, peers):
            point = theirs[1]
            return self._decide(_verdict_at(point.sequence, point.number), self._deadlock((self._rank, mine), theirs))
        if sequence.is_rendezvous and (elsewhere := self._watchdog.ask()):
            return self._deadlock((self._rank, mine), elsewhere=elsewhere)
        return ""

    def _is_decided(self, key: str, seconds: float) -> bool:
        """Return whether a verdict is there within so many seconds."""
        return any(self._store.check([key]) for _ in polling(seconds))

    def _decide(self, key: str, verdict: str) -> str:
        """Leave a verdict for all that wait there. Returns the one that counts, which is the first."""
        return self._store.compare_set(key, "", verdict).decode()

    def _keys(self, number: int) -> tuple[str, str, str]:
        """The keys of what the first came to a rendezvous for, of how many came for the same, and of the verdict."""
        prefix = f"{self._met.name}/{number}"
        return f"{prefix}/asked", f"{prefix}/agreed", _verdict_at(self._met.name, number)

    def _late(self, sequence: CallSequence, what: str, timeout: float) -> str:
        """Return what is said of a wait that took too long."""
        if not sequence.is_rendezvous:
            return unexplained(what, self._rank, self._size, timeout)
        return (
            f"{what} failed on rank {self._rank} of {self._size}: the other ranks did not come to it within "
            f"collective_timeout ({timeout:g} s). It is {_ADVICE}"
        )

    def _failed(self, what: str, ended: list[int]) -> str:
        return f"{what} failed on rank {self._rank} of {self._size}: {_named(ended)} ended, or left torch.distributed"

    def _deadlock(self, *waits: tuple[int, WaitPoint], elsewhere: str = "") -> str:
        """Return what is said of ranks that wait for each other, each at a point; or, in words, in other code."""
        said, is_rendezvous = [], any(point.is_rendezvous for _, point in waits)
        for rank, point in sorted(waits, key=lambda wait: not wait[1].is_rendezvous):
            if point.is_rendezvous:
                said.append(f"rank {rank} of {self._size} for the others to come to {point.what}")
            else:
                said.append(f"rank {rank} for {point.what} to begin {'there' if is_rendezvous else 'elsewhere'}")
        reason = f"ranks wait for each other: {', and '.join(filter(None, [*said, elsewhere]))}"
        return f"{reason}. The first is {_ADVICE}" if is_rendezvous else reason

    @contextlib.contextmanager
    def naming(self, what: str, timeout: float) -> Iterator[None]:
        """Errors of torch.distributed in the block say which rank waited for what, and which one ended. Raises:
        RanksError."""
        try:
            yield
        except RanksError:
            raise
        except (RuntimeError, ValueError) as error:
            for _ in polling(PATIENCE):  # a connection closes before its process is gone
                if ended := self._watchdog.ended():
                    reason = self._failed(what, ended)
                    break
            else:
                reason = unexplained(what, self._rank, self._size, timeout)
            raise RanksError(f"{reason}. torch.distributed says: {error}") from error


def unexplained(what: str, rank: int, size: int, timeout: float) -> str:
    """Return what is said of a collective that failed on a rank when nothing else is known."""
    return (
        f"{what} failed on rank {rank} of {size}: another rank ended, or does something else at this point, or took "
        f"longer than collective_timeout ({timeout:g} s)"
    )


def _verdict_at(sequence: str, number: int) -> str:
    """Return the key of the verdict about all that wait at a point."""
    return f"{sequence}/{number}/verdict"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def agree_on_name(store: dist.Store, rank: int, size: int, timeout: float) -> tuple[str, list[Process]]:
    """Return a name that is new in the store and the same on all ranks, and their processes, in order. All of the ranks
    call this. `store`: of this group's name.

    Raises: RanksError when the others don't come in time.
    """
    mine = json.dumps([secrets.token_hex(8), Process.of(os.getpid())])
    store.set(f"hello/{rank}", mine)
    name, welcomed, came = secrets.token_hex(8) if rank == 0 else "", None, False
    for _ in polling(timeout):
        if rank == 0 and not _all_came(store, name, size):
            hellos = _texts(store, [f"hello/{peer}" for peer in range(size)])
            if hellos is not None and hellos != welcomed:
                store.set("welcome", json.dumps([name, hellos]))
                welcomed = hellos
        welcome = _texts(store, ["welcome"])
        offered, hellos = json.loads(welcome[0]) if welcome else ("", [])
        if not came and len(hellos) == size and hellos[rank] == mine:
            name, came = offered, True
            store.set(f"{name}/came/{rank}", "")
            store.add(f"{name}/came", 1)
        if came and _all_came(store, name, size):
            welcome = _texts(store, ["welcome"])
            assert welcome is not None
            return name, [Process(*json.loads(hello)[1]) for hello in json.loads(welcome[0])[1]]
    absent = [peer for peer in range(size) if peer != rank and not (name and store.check([f"{name}/came/{peer}"]))]
    who = f"rank(s) {', '.join(map(str, absent))}" if name else "rank 0, or another one,"
    raise RanksError(
        f"rank {rank} of {size} began to work with the others of its process group, as offload() and checkpoints do, "
        f"and {who} did not come within collective_timeout ({timeout:g} s): all ranks of a group call these at the "
        "same point"
    )


def _all_came(store: dist.Store, name: str, size: int) -> bool:
    return store.add(f"{name}/came", 0) == size


def _texts(store: dist.Store, keys: list[str]) -> list[str] | None:
    """Return what the store has under some keys; None where not all are there."""
    return [store.get(key).decode() for key in keys] if store.check(keys) else None
