"""A rank sees, while it waits in a collective of other code, that another rank waits for it in a meeting.

[Note: onlooker]
`if rank == 0: torch.save(model.state_dict())`, and `dist.barrier()` for the others: the first rank waits in a meeting,
and no other rank can say that it won't come, because it waits within torch.distributed. So each rank has a thread that
looks in the store, once per second, whether another one waits for long. If so, it looks where its own rank is. What it
tells is the group of a collective that this rank is in at two looks, and how many collectives it had started in the
group at both. The rank that waits compares that with the number of its own: where that is smaller, it has not started
the collective that the other one is in, and never will.

No rank that is merely late is taken for one that waits. One that computes is in no such call. A collective that the
first rank has started, as one with `async_op`, or whose data is on the way, is counted there. Gloo counts messages
from one rank to another with them, so in groups of more than two ranks numbers may differ by these: there, only those
collectives are told of which end on no rank before all have started them. A rank where several threads come to meetings
tells nothing, and asks for nothing, while more than one of them is there: what one waits for may be started by another.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import FrameType

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group

from zinf_fx.runtime.presence import Presence

_INTERVAL = 1.0  # seconds from one look to the next
# They end on no rank before all of the group have started them.
_OF_ALL = {"barrier", "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_object", "all_gather_single"} | {
    "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
}  # fmt: skip
_CALLS = distributed_c10d.__file__
_WRAPPERS = os.path.join(os.path.dirname(_CALLS), "c10d_logger.py")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Onlooker:
    """Of one rank's meetings. Its thread ends with `end`."""

    def __init__(self, store: dist.Store, rank: int, presence: Presence) -> None:
        """`store`: of these meetings alone. `rank`: this one's number in them."""
        self._store, self._rank, self._presence = store, rank, presence
        self._process = os.getpid()
        self._arrived = 0
        self._threads = {threading.get_ident()}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="zinf_fx onlooker", daemon=True)
        self._thread.start()

    def arrive(self, meeting: int) -> None:
        """This thread comes to the meeting of this number."""
        self._threads.add(threading.get_ident())
        self._arrived = meeting

    def ask(self) -> str:
        """What another rank is in that waits for this one, which waits in a meeting; or nothing."""
        if len(self._threads_left()) > 1:
            return ""
        self._store.set("late", f"{self._arrived} {dist.get_rank()}")
        if not self._store.check(["blocked"]):
            return ""
        meeting, asked, started, group, what = self._store.get("blocked").decode().split(" ", 4)
        for_this = (int(meeting), int(asked)) == (self._arrived, dist.get_rank())
        return what if for_this and _started(_resolve_process_group(group)) < int(started) else ""

    def _threads_left(self) -> list[int]:
        """Return the threads that have come to meetings and have not ended: no other one comes to the next."""
        running = sys._current_frames()
        return [thread for thread in list(self._threads) if thread in running]

    def end(self) -> None:
        """Let the thread end. In a process made by fork there is none."""
        if os.getpid() == self._process:
            self._ended.set()
            if threading.current_thread() is not self._thread:
                self._thread.join(5)  # a thread that is in the store when the interpreter ends, ends the process badly

    def _look_on(self) -> None:
        before = ""
        with contextlib.suppress(dist.DistError):  # the store is gone, and the ranks with it
            while not self._ended.wait(_INTERVAL):
                self._presence.ended()  # says so of others on this machine
                late = self._store.get("late").decode() if self._store.check(["late"]) else "0 0"
                meeting, rank = map(int, late.split())
                found = self._blocked(rank) if meeting > self._arrived else ""
                if found and found == before:
                    self._store.set("blocked", f"{late} {found}")
                before = found

    def _blocked(self, waiting: int) -> str:
        """The collective this rank is in, which needs the global rank `waiting`: what `ask` reads; or nothing."""
        threads = self._threads_left()
        frame = sys._current_frames().get(*threads) if len(threads) == 1 else None
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
    """How many collectives this rank has started in a group; 0 where its backend doesn't count."""
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return 0
