"""Which ranks have ended, in whatever way.

[Note: presence]
A rank that ends as Python does says so in torch.distributed's store. One that is killed says nothing, and torch's error
names an address. So ranks tell each other their processes when they begin. Each looks after those on its own machine,
once per second, and says of one that is gone that it ended: ranks on other machines read it. Where no rank is left on a
machine, nobody knows, and the time-out of collectives has to do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist


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
    """The state of a process on this machine, as a letter of proc(5), and when it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


class Presence:
    """One rank of a group knows by this which of the others are there. When this object is gone, so is its rank, for
    the others."""

    def __init__(self, store: dist.Store, rank: int, processes: Sequence[Process]) -> None:
        """`store`: of this group alone. `processes`: of the ranks, in order."""
        here = processes[rank].machine
        self._store = store
        self._near = {other: process for other, process in enumerate(processes) if here and process.machine == here}
        self._near.pop(rank, None)
        self._ended: set[int] = set()
        self._size, self._counted = len(processes), 0
        self._lock = threading.Lock()
        weakref.finalize(self, _leave, store, rank, os.getpid())

    def ended(self) -> list[int]:
        """The ranks that ended, or left torch.distributed."""
        with self._lock:
            gone = {rank for rank, process in self._near.items() if process.is_gone()} - self._ended
            self._ended |= gone
            with contextlib.suppress(RuntimeError):  # the store ended, with the rank that has it
                for rank in gone:
                    _say_ended(self._store, rank)
                counted = self._store.add("ended", 0)
                if counted != self._counted:
                    present = set(range(self._size)) - self._ended
                    self._ended |= {rank for rank in present if self._store.check([f"ended/{rank}"])}
                    self._counted = counted
            return sorted(self._ended)


def _say_ended(store: dist.Store, rank: int) -> None:
    store.set(f"ended/{rank}", "")
    store.add("ended", 1)  # last: whoever ends before this hides nobody's end from those who count


def _leave(store: dist.Store, rank: int, pid: int) -> None:
    """Let the others know that this rank ends: not a process that it made by fork."""
    if os.getpid() == pid:
        with contextlib.suppress(RuntimeError):  # the store ended first
            _say_ended(store, rank)
