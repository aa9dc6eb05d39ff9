"""This rank's view of the others: which have ended, what each waits for, and collectives that take long.

[Note: ranks that ended]
A rank that ends as Python does says so in torch.distributed's store. One that is killed says nothing, and torch's error
names an address. So ranks tell each other their processes when they begin. Each looks after those on its own machine,
once per second, and says of one that is gone that it ended: ranks on other machines read it. Where no rank is left on a
machine, nobody knows, and the time-out of collectives has to do.

[Note: deadlocks]
A rank that waits for long says at which number of which `CallSequence`, and how far it is in each of its own. Two ranks
wait for each other when neither has come to what the other one waits for: each would have to go on to come there. One
that computes in a second thread may do so. So both have to be seen twice where they are, and to have begun nothing in
between.

[Note: watchdog]
`if rank == 0: torch.save(model.state_dict())`, and `dist.barrier()` for the others: the first rank waits in a
rendezvous, and no other rank can say that it won't come, because it waits within torch.distributed. So each rank has a
thread that looks in the store, once per second, whether another one waits for long. If so, it looks where its own rank
is. What it tells is the group of a collective that this rank is in at two looks, and how many collectives it had
started in the group at both. The rank that waits compares that with the number of its own: where that is smaller, it
has not started the collective that the other one is in, and never will.

No rank that is merely late is taken for one that waits. One that computes is in no such call. A collective that the
first rank has started, as one with `async_op`, or whose data is on the way, is counted there. Gloo counts messages
from one rank to another with them, so in groups of more than two ranks numbers may differ by these: there, only those
collectives are told of which end on no rank before all have started them. A rank where several threads come to
rendezvous tells nothing, and asks for nothing, while more than one of them is there: what one waits for may be started
by another.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group

log = logging.getLogger("zinf_fx")

_INTERVAL = 1.0  # seconds from one look at the other ranks to the next
# They end on no rank before all of the group have started them.
_OF_ALL = {"barrier", "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_object", "all_gather_single"} | {
    "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
}  # fmt: skip
_CALLS = distributed_c10d.__file__
_WRAPPERS = os.path.join(os.path.dirname(_CALLS), "c10d_logger.py")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep

# Of the time that a collective may take: the watchdog of NCCL, which knows no tile, ends the process after all of it.
_PATIENT_SHARE = 0.1
_LOOKS = 10  # in that time


class Process(NamedTuple):
    """A process, which no other one is taken for.

    Attributes:
        machine: in whose numbers `pid` is one; empty where that can't be told.
        started: when, in ticks of that machine.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(_machine(), pid, _state_of(pid)[1])

    def is_gone(self) -> bool:
        """Whether it ended, asked on its machine."""
        try:
            state, started = _state_of(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX" or started != self.started


@functools.cache
def _machine() -> str:
    """The boot of this machine, and the namespace that numbers processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_of(pid: int) -> tuple[str, str]:
    """Return the state of a process on this machine, as a letter of proc(5), and when it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


class CallSequence:
    """A sequence of things that all ranks of a group do in the same order: their rendezvous, or their collectives.

    Attributes:
        name: the same on all ranks of the group, and of no other sequence.
        number: how many things this rank has come to.
        is_rendezvous: whether it is one of rendezvous, in which ranks meet before they begin anything.
        given_up: the number up to which this rank waits for nothing any more.
        failed: why the ranks' collectives don't match any more; empty while they do.
    """

    def __init__(self, name: str, is_rendezvous: bool) -> None:
        self.name, self.is_rendezvous, self.number = name, is_rendezvous, 0
        self.given_up, self.failed = 0, ""


class WaitPoint(NamedTuple):
    """Something in a sequence of calls, which a rank waits for.

    Attributes:
        what: names it.
        numbers: how far that rank is in each sequence.
    """

    sequence: str
    number: int
    what: str
    is_rendezvous: bool
    numbers: dict[str, int]

    def is_before(self, other: WaitPoint) -> bool:
        """Whether the rank that waits here has not come to another point, of a sequence that it takes part in."""
        return self.numbers.get(other.sequence, other.number) < other.number


class Waits:
    """This object holds the call sequences of a process, and tells the other ranks what it waits for in them. While
    several threads wait for long, it tells nothing: what one waits for may be done by another."""

    def __init__(self) -> None:
        self._sequences: weakref.WeakValueDictionary[str, CallSequence] = weakref.WeakValueDictionary()
        self._threads: set[int] = set()  # that wait for long, now
        self._said: tuple[dist.Store, str] | None = None  # where the others read what this rank waits for
        # At the last look: where this rank waits, and others.
        self._seen: tuple[WaitPoint, dict[int, WaitPoint]] | None = None

    def sequence(self, name: str, is_rendezvous: bool) -> CallSequence:
        """Return a new sequence of this process."""
        self._sequences[name] = sequence = CallSequence(name, is_rendezvous)
        return sequence

    def numbers(self) -> dict[str, int]:
        """Return how far this rank is in each sequence."""
        return {name: sequence.number for name, sequence in list(self._sequences.items())}

    def publish(self, store: dist.Store, rank: int, point: WaitPoint) -> bool:
        """Let the others know what this thread waits for; return whether that was said. `rank`: this one's, in all of
        torch.distributed."""
        self._threads.add(threading.get_ident())
        if len(self._threads) > 1:
            self._clear()
            return False
        self._said = store, _key(rank)
        store.set(self._said[1], json.dumps(point))
        return True

    def withdraw(self) -> None:
        """Let the others know that this thread goes on."""
        if threading.get_ident() in self._threads:
            self._threads.discard(threading.get_ident())
            self._clear()

    def _clear(self) -> None:
        said, self._said, self._seen = self._said, None, None
        if said is not None:
            store, key = said
            store.set(key, "")

    def deadlock(self, store: dist.Store, mine: WaitPoint, ranks: Mapping[int, int]) -> tuple[int, WaitPoint] | None:
        """Return the first of the `ranks`, and where it waits, that waits for this one and is waited for by it, at this
        look and the last one. `ranks`: by their numbers in the group, those in all of torch.distributed."""
        points = {rank: point for rank, everywhere in ranks.items() if (point := _said_by(store, everywhere))}
        deadlocked = {rank: point for rank, point in points.items() if point.is_before(mine) and mine.is_before(point)}
        before, self._seen = self._seen, (mine, deadlocked)
        if before is None or before[0] != mine:
            return None
        return next(((rank, point) for rank, point in deadlocked.items() if before[1].get(rank) == point), None)


def _key(rank: int) -> str:
    return f"waits/{rank}"


def _said_by(store: dist.Store, rank: int) -> WaitPoint | None:
    """Return what a rank of torch.distributed waits for, if it said so."""
    if store.check([_key(rank)]) and (said := store.get(_key(rank)).decode()):
        return WaitPoint(*json.loads(said))
    return None


class Watchdog:
    """One rank of a group knows by this which of the others ended, and what keeps one from coming to a rendezvous.

    `start` gives it a thread; `end` lets the thread end, and the others know that this rank is gone.
    """

    def __init__(self, store: dist.Store, rank: int, processes: Sequence[Process]) -> None:
        """`store`: of this group alone. `processes`: of its ranks, in order."""
        here = processes[rank].machine
        self._store, self._rank, self._size = store, rank, len(processes)
        self._near = {peer: process for peer, process in enumerate(processes) if here and process.machine == here}
        self._near.pop(rank, None)
        self._ended: set[int] = set()
        self._ends_counted = 0
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._arrived = 0
        self._threads = {threading.get_ident()}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zinf_fx watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look after the other ranks in a thread."""
        self._thread.start()

    def ended(self) -> list[int]:
        """Return the ranks that ended, or left torch.distributed."""
        with self._lock:
            gone = {rank for rank, process in self._near.items() if process.is_gone()} - self._ended
            self._ended |= gone
            with contextlib.suppress(RuntimeError):  # the store ended, with the rank that has it
                for rank in gone:
                    self._say_ended(rank)
                count = self._store.add("ended", 0)
                if count != self._ends_counted:
                    present = set(range(self._size)) - self._ended
                    self._ended |= {rank for rank in present if self._store.check([f"ended/{rank}"])}
                    self._ends_counted = count
            return sorted(self._ended)

    def _say_ended(self, rank: int) -> None:
        self._store.set(f"ended/{rank}", "")
        self._store.add("ended", 1)  # last: whoever ends before this hides nobody's end from those who count

    def arrive(self, rendezvous: int) -> None:
        """Note that this thread comes to the rendezvous of this number."""
        self._threads.add(threading.get_ident())
        self._arrived = rendezvous

    def ask(self) -> str:
        """Return the collective in which another rank waits for this one, which waits in a rendezvous; or nothing."""
        if len(self._threads_left()) > 1:
            return ""
        self._store.set("late", f"{self._arrived} {dist.get_rank()}")
        if not self._store.check(["blocked"]):
            return ""
        number, asked, started, group, what = self._store.get("blocked").decode().split(" ", 4)
        for_this = (int(number), int(asked)) == (self._arrived, dist.get_rank())
        if not for_this:
            return ""
        known = _resolve_process_group(group)  # pyright: ignore[reportArgumentType]  (a NewType of torch's)
        return what if _started(known) < int(started) else ""

    def _threads_left(self) -> list[int]:
        """Return the threads that have come to a rendezvous and have not ended: no other one comes to the next."""
        running = sys._current_frames()
        return [thread for thread in list(self._threads) if thread in running]

    def end(self) -> None:
        """Stop the thread, and let the others know that this rank ends: not in a process that it made by fork."""
        if os.getpid() != self._process:
            return
        self._stopping.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(5)  # a thread that is in the store when the interpreter ends, ends the process badly
        with contextlib.suppress(RuntimeError):  # the store ended first
            self._say_ended(self._rank)

    def _run(self) -> None:
        before = ""
        with contextlib.suppress(dist.DistError):  # the store is gone, and the ranks with it
            while not self._stopping.wait(_INTERVAL):
                self.ended()  # says so of others on this machine
                late = self._store.get("late").decode() if self._store.check(["late"]) else "0 0"
                number, rank = map(int, late.split())
                blocked = self._blocked(rank) if number > self._arrived else ""
                if blocked and blocked == before:
                    self._store.set("blocked", f"{late} {blocked}")
                before = blocked

    def _blocked(self, waiting: int) -> str:
        """Return the collective this rank is in, which needs the global rank `waiting`: what `ask` reads; or
        nothing."""
        threads = self._threads_left()
        frame = sys._current_frames().get(threads[0]) if len(threads) == 1 else None
        while frame is not None and not _is_collective(frame):
            frame = frame.f_back
        if frame is None:
            return ""
        name, caller, given = frame.f_code.co_name, frame.f_back, frame.f_locals
        group = given.get("group") or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup) or waiting not in dist.get_process_group_ranks(group):
            return ""
        if name == "broadcast" and (group.size() > 2 or given.get("group_src") == group.rank()):
            return ""
        while caller is not None and caller.f_code.co_filename in (_CALLS, _WRAPPERS):
            name = caller.f_code.co_name if caller.f_code.co_filename == _CALLS else name
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename.startswith(_OURS):
            return ""
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        what = f"rank {self._rank} in torch.distributed.{name}(), called at {where}"
        return f"{_started(group)} {group.group_name} {what}"


def _is_collective(frame: FrameType) -> bool:
    return frame.f_code.co_filename == _CALLS and frame.f_code.co_name in {*_OF_ALL, "broadcast"}


def _started(group: dist.ProcessGroup) -> int:
    """Return how many collectives this rank has started in a group; 0 where its backend doesn't count."""
    try:
        return group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]  (not in stubs)
    except RuntimeError:
        return 0


class QueuedCollective:
    """A collective in the queue of a device.

    Attributes:
        what: names it and the tile.
        is_over: whether it is, asked in any thread.
    """

    def __init__(self, work: dist.Work, what: str, mark: Callable[[], Callable[[], bool]]) -> None:
        """`mark`: of the device, as `Device.mark`."""
        self.what, self._mark = what, mark
        self.is_over: Callable[[], bool] = work.is_completed

    def joined(self) -> None:
        """Note that what this thread queues from now on follows it. So does a mark there, and its `Work` may go, which
        owns the memory that it moves: however far the program runs ahead, that memory is somebody else's from now
        on."""
        self.is_over = self._mark()


class DeviceWatchdog:
    """Looks after the collectives that one rank has queued, in a thread that is there while there are any."""

    def __init__(self, who: str, timeout: float) -> None:
        """`who`: the rank, for messages; `timeout`: seconds that a collective may take."""
        self._who, self._patience = who, timeout * _PATIENT_SHARE
        self._queued: deque[QueuedCollective] = deque()
        self._since, self._named = 0.0, False  # when the first one became that; whether the log has named it
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work, what: str, mark: Callable[[], Callable[[], bool]]) -> QueuedCollective:
        """Note that a collective was queued behind those before it. `what` names it and the tile; `mark`: as of
        `QueuedCollective`."""
        queued = QueuedCollective(work, what, mark)
        with self._lock:
            self._let_go_of_completed()
            self._queued.append(queued)
            if self._thread is None or not self._thread.is_alive():
                self._since, self._named = time.monotonic(), False
                self._thread = threading.Thread(target=self._look_after, name="zinf-collectives", daemon=True)
                self._thread.start()
        return queued

    def _let_go_of_completed(self) -> None:
        while self._queued and self._queued[0].is_over():
            self._queued.popleft()
            self._since, self._named = time.monotonic(), False

    def _look_after(self) -> None:
        while True:
            time.sleep(self._patience / _LOOKS)
            with self._lock:
                self._let_go_of_completed()
                if not self._queued:
                    self._thread = None
                    return
                waited, what = time.monotonic() - self._since, self._queued[0].what
                if self._named or waited <= self._patience:
                    continue
                self._named = True
            log.warning(
                "%s has waited %.3g s for %s: another rank ended, or does something else at this point, or its "
                "device computes something for so long",
                self._who,
                waited,
                what,
            )
