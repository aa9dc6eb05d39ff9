"""Ranks see that all of them ask for the same collective before it begins, and what others do when one doesn't come.

[Note: meetings]
The collectives of graphs are compared before these run: see [Note: order]. What code outside of them asks for (the
value of a partitioned tensor, an agreement) may be asked for by one rank alone: `if rank == 0:
torch.save(model.state_dict())`. Started as it is, such a collective meets another one of the other ranks, and buffers
of different lengths end the process. So ranks meet first, in torch.distributed's store: there, what each asks for is
compared by name, and no collective is left behind in a process group when they differ.

A rank that waits for long, in a meeting or for a collective, says so in the store (`courses.py`). Where two wait for
each other, they would for ever: whoever finds that out leaves a verdict at the point where each of them waits, for all
that wait there. So does one that finds that a rank has ended ([Note: presence]). For collectives of other code, see
[Note: onlooker].
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zinf_fx.errors import RanksError
from zinf_fx.runtime.courses import Course, Point, Waits
from zinf_fx.runtime.introduction import introduced
from zinf_fx.runtime.onlooker import Onlooker
from zinf_fx.runtime.presence import Presence
from zinf_fx.runtime.waiting import Waiting, polling

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
_FINE = "fine"  # the verdict of a meeting that all have come to


class Meetings:
    """This object holds the meetings of a group of ranks, of which this process is one, and the collectives that they
    begin."""

    _waits: ClassVar[Waits] = Waits()  # of this process, in all groups
    _known: ClassVar[dict[dist.ProcessGroup, Meetings]] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float) -> Meetings:
        """Return the meetings of a group. All of its ranks call this, for the first time at the same point. Raises:
        RanksError when one doesn't, for `timeout` seconds."""
        known = cls._known.get(group)
        if known is None:
            known = cls._known[group] = cls(group, timeout)
        return known

    @classmethod
    def forget(cls, group: dist.ProcessGroup) -> Meetings:
        """Let go of the meetings of a group that torch.distributed has no more: they have a thread and sockets."""
        return cls._known.pop(group)

    @classmethod
    def groups(cls) -> list[dist.ProcessGroup]:
        return list(cls._known)

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        store = dist.PrefixStore("zinf_fx", _get_default_store())
        self._members = dist.get_process_group_ranks(group)
        self._rank, self._size = dist.get_rank(group), len(self._members)
        of_this_name = dist.PrefixStore(group.group_name, store)
        name, processes = introduced(of_this_name, self._rank, self._size, timeout)
        self._store, of_this_attempt = store, dist.PrefixStore(name, store)
        self._met, self._begun = self._waits.course(f"{name}/met", True), self._waits.course(f"{name}/begun", False)
        self._exchanged = self._waits.course(f"{name}/exchanged", False)  # by connections of their own
        self._presence = Presence(of_this_attempt, self._rank, processes)
        self._connections = dist.PrefixStore("connections", of_this_attempt)
        self._agreement: dist.ProcessGroupGloo | None = None
        self._warned = False  # of the meeting under way
        self._onlooker = Onlooker(of_this_attempt, self._rank, self._presence)
        weakref.finalize(self, self._onlooker.end)

    def meet(self, what: str, timeout: float) -> None:
        """Return when all ranks have come for `what`.

        Raises: RanksError, on every rank that has come, when one comes for something else, waits for what another one
        won't begin, or has ended; or when one doesn't come within `timeout` seconds.
        """
        self._met.number += 1
        number = self._met.number
        self._warned = False
        self._onlooker.arrive(number)
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
        """A collective begins in the group: the number that it has on all ranks.

        Raises: RanksError after one that failed. This rank and others may have begun different ones since, and those
        that are met by another one give wrong values, or end the process.
        """
        return self._next(self._begun, what)

    def _next(self, course: Course, what: str) -> int:
        if course.failed:
            raise RanksError(
                f"{what} was refused on rank {self._rank} of {self._size}: an earlier collective of the process group "
                "failed, and the ranks' collectives don't match any more. End all ranks, and resume from a checkpoint. "
                f"What failed: {course.failed}"
            )
        course.number += 1
        return course.number

    def wait(self, work: dist.Work, what: str, number: int, timeout: float) -> None:
        """Return when `work` is over, which is the collective of this number.

        Raises: RanksError when it isn't going to begin on another rank, or one has ended, or after `timeout` seconds;
        what torch.distributed raises.
        """
        self._wait_for(work, self._begun, number, what, timeout)

    def _wait_for(self, work: dist.Work, course: Course, number: int, what: str, timeout: float) -> None:
        with self.naming(what, timeout):
            try:
                if work.is_completed():
                    work.wait()
                elif number <= course.given_up:
                    why = course.failed or "an earlier wait of this rank was interrupted"
                    raise RanksError(f"{what} was given up on rank {self._rank} of {self._size}: {why}")
                else:
                    with Waiting.for_work(work) as waiting:
                        self._wait(waiting.over, course, number, what, timeout)
            except BaseException as error:
                course.given_up = course.number
                if isinstance(error, Exception):
                    course.failed = course.failed or str(error)
                raise

    def exchange(self, value: Any, what: str, timeout: float) -> list[Any]:
        """The `value` of each rank. Raises: RanksError, on every rank, when one does not come for it."""
        self.meet(what, timeout)
        with self.naming(what, timeout):
            mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            sizes = [int(size) for size in self._gathered(torch.tensor([mine.numel()]), what, timeout)]
            room = torch.zeros(max(sizes), dtype=torch.uint8)
            room[: mine.numel()] = mine
            found = self._gathered(room, what, timeout)
        return [pickle.loads(one[:size].numpy().tobytes()) for one, size in zip(found, sizes, strict=True)]

    def compare(self, numbers: Sequence[int], what: str, timeout: float) -> list[bool]:
        """Whether each of the numbers is the same on all ranks, as one collective, without a meeting before it. Raises:
        RanksError, as `wait`."""
        with self.naming(what, timeout):
            found = torch.stack(self._gathered(torch.tensor(numbers), what, timeout))
        return (found == found[0]).all(0).tolist()

    def _gathered(self, mine: torch.Tensor, what: str, timeout: float) -> list[torch.Tensor]:
        """The tensor that each rank gives. They travel by connections of their own: those of the group may be busy with
        what has failed, and its backend may have no collectives in host memory."""
        if self._agreement is None:
            self._agreement = self._connected(what, timeout)
        number = self._next(self._exchanged, what)
        room = [torch.empty_like(mine) for _ in range(self._size)]
        work = self._agreement.allgather([room], [mine])
        self._wait_for(work, self._exchanged, number, what, timeout)
        return room

    def _connected(self, what: str, timeout: float) -> dist.ProcessGroupGloo:
        """Under the name of these meetings: what a group of torch.distributed finds under its own may be of ranks that
        are dead."""
        made: list[dist.ProcessGroupGloo] = []
        arguments = self._connections, self._rank, self._size, _LONGER
        number = self._next(self._exchanged, what)
        with Waiting(lambda: made.append(dist.ProcessGroupGloo(*arguments)) is None) as waiting:
            self._wait(waiting.over, self._exchanged, number, what, timeout)
        return made.pop()

    def _wait(self, over: Callable[[float], bool], course: Course, number: int, what: str, timeout: float) -> None:
        """Return when `over`, which waits for so many seconds at most, says so, and no verdict is against it. Raises:
        what it raises; RanksError."""
        end, key, ended = time.monotonic() + timeout, _verdict_at(course.name, number), []
        try:
            while (left := end - time.monotonic()) > 0:
                if over(min(PATIENCE, left)):
                    verdict = self._store.get(key).decode() if course.is_met else _FINE
                    break
                before, ended = ended, self._presence.ended()
                # What one has sent before it ended may be on its way.
                gone = ended if course.is_met else [rank for rank in ended if rank in before]
                if reason := self._trouble(course, number, what, gone):
                    verdict = self._decide(key, reason)
                    break
            else:
                verdict = self._decide(key, self._late(course, what, timeout))
        except BaseException as error:  # an interrupt, too: this rank does not wait any more
            failed = f"{what} failed on rank {self._rank} of {self._size}: {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # the store ended first
                self._decide(key, failed)
            raise
        finally:
            with contextlib.suppress(RuntimeError):  # the store ended first
                self._waits.say_nothing()
        if verdict != _FINE:
            raise RanksError(verdict)

    def _trouble(self, course: Course, number: int, what: str, ended: list[int]) -> str:
        """Why a rank that waits here will wait for ever; or nothing."""
        key = _verdict_at(course.name, number)
        if self._store.check([key]):
            return self._store.get(key).decode()
        if ended and course.is_met:
            return (
                f"rank {self._rank} of {self._size} waits for the others to come to {what}, and {_named(ended)} ended, "
                f"or left torch.distributed. The first is {_ADVICE}"
            )
        if ended:
            return self._failed(what, ended)
        if course.is_met and not self._warned:
            self._warned = True
            log.warning(
                f"rank {self._rank} of {self._size} has waited {PATIENCE:g} s for the other ranks to come to {what}, "
                f"{_ADVICE}"
            )
        mine = Point(course.name, number, what, course.is_met, self._waits.numbers())
        if not self._waits.say(self._store, self._members[self._rank], mine):
            return ""
        others = {rank: member for rank, member in enumerate(self._members) if rank != self._rank}
        if theirs := self._waits.deadlock(self._store, mine, others):
            point = theirs[1]
            return self._decide(_verdict_at(point.course, point.number), self._deadlock((self._rank, mine), theirs))
        if course.is_met and (elsewhere := self._onlooker.ask()):
            return self._deadlock((self._rank, mine), elsewhere=elsewhere)
        return ""

    def _is_decided(self, key: str, seconds: float) -> bool:
        """Whether a verdict is there within so many seconds."""
        return any(self._store.check([key]) for _ in polling(seconds))

    def _decide(self, key: str, verdict: str) -> str:
        """Leave a verdict for all that wait there. Returns the one that counts, which is the first."""
        return self._store.compare_set(key, "", verdict).decode()

    def _keys(self, meeting: int) -> tuple[str, str, str]:
        """The keys of what the first came to a meeting for, of how many came for the same, and of the verdict."""
        prefix = f"{self._met.name}/{meeting}"
        return f"{prefix}/asked", f"{prefix}/agreed", _verdict_at(self._met.name, meeting)

    def _late(self, course: Course, what: str, timeout: float) -> str:
        """Return what is said of a wait that took too long."""
        if not course.is_met:
            return unexplained(what, self._rank, self._size, timeout)
        return (
            f"{what} failed on rank {self._rank} of {self._size}: the other ranks did not come to it within "
            f"collective_timeout ({timeout:g} s). It is {_ADVICE}"
        )

    def _failed(self, what: str, ended: list[int]) -> str:
        return f"{what} failed on rank {self._rank} of {self._size}: {_named(ended)} ended, or left torch.distributed"

    def _deadlock(self, *waits: tuple[int, Point], elsewhere: str = "") -> str:
        """Return what is said of ranks that wait for each other, each at a point; or, in words, in other code."""
        said, is_met = [], any(point.is_met for _, point in waits)
        for rank, point in sorted(waits, key=lambda wait: not wait[1].is_met):
            if point.is_met:
                said.append(f"rank {rank} of {self._size} for the others to come to {point.what}")
            else:
                said.append(f"rank {rank} for {point.what} to begin {'there' if is_met else 'elsewhere'}")
        reason = f"ranks wait for each other: {', and '.join(filter(None, [*said, elsewhere]))}"
        return f"{reason}. The first is {_ADVICE}" if is_met else reason

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
                if ended := self._presence.ended():
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


def _verdict_at(course: str, number: int) -> str:
    """Return the key of the verdict about all that wait at a point."""
    return f"{course}/{number}/verdict"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
