"""What arenas have in common: their memory is leased in buffers, which come back when the last transfer is done."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from zinf_fx.errors import StoreError
from zinf_fx.interrupts import finalizing, sealed
from zinf_fx.runtime.finalizers import finalize
from zinf_fx.runtime.memory.freelist import Space
from zinf_fx.sizes import blocks

# Bytes of released buffers that a device has still to read before the release of one more waits.
_MAX_BYTES_LEAVING = 256 << 20


class Ticket(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Whether it is over."""

    def wait(self) -> None:
        """Returns when it is over."""


T = TypeVar("T", bound=Ticket)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class JoinedTicket:
    """Several transfers under way, as one."""

    tickets: Sequence[Ticket]

    def done(self) -> bool:
        """Whether all are over, well or not."""
        return all(ticket.done() for ticket in self.tickets)

    def wait(self) -> None:
        """Returns when all bytes are there. Raises: StoreError of the first that failed, after all have ended."""
        failure: StoreError | None = None
        for ticket in self.tickets:
            try:
                ticket.wait()
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def all_started(starting: Iterable[T]) -> list[T]:
    """The transfers that are started one after the other. Where one can't be, those before it have ended when that is
    raised: who asked for them gives back what they move."""
    tickets: list[T] = []
    try:
        for ticket in starting:
            tickets.append(ticket)
    except BaseException:
        for ticket in tickets:
            with sealed, suppress(StoreError):
                ticket.wait()
        raise
    return tickets


def joined(tickets: Sequence[Ticket]) -> Ticket:
    """Transfers as one."""
    return tickets[0] if len(tickets) == 1 else JoinedTicket(tickets)


class Leaving:
    """Buffers that transfers under way still use, in the order in which these were asked for: when each is free.

    Attributes:
        lock: whoever takes buffers out has it; held from a look at the queue to what follows from it.
        nbytes: of the buffers.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nbytes = 0
        self._queue: deque[tuple[Ticket, Buffer]] = deque()

    def __bool__(self) -> bool:
        """Whether there is any buffer."""
        return bool(self._queue)

    def add(self, ticket: Ticket, buffer: Buffer) -> None:
        """Take over `buffer` until `ticket` is done."""
        with self.lock:
            self._queue.append((ticket, buffer))
            self.nbytes += buffer.capacity

    @property
    def first_is_done(self) -> bool:
        """Whether `retire` would return at once."""
        return self._queue[0][0].done()

    def retire(self) -> None:
        """Wait for the first transfer, and give its buffer back. Raises: StoreError when it failed."""
        with self.lock:
            if not self._queue:
                return
            ticket, buffer = self._queue[0]
            try:
                ticket.wait()
            finally:
                if ticket.done():  # not after Ctrl-C: the transfer goes on
                    self._queue.popleft()
                    self.nbytes -= buffer.capacity
                    buffer.release()

    def retire_done(self) -> None:
        """Give back what is free."""
        with self.lock:
            while self._queue and self.first_is_done:
                self.retire()


class Lessor(ABC):
    """What buffers are leased from: a memory, and how much of it is taken.

    Attributes:
        name: the memory's, for messages.
        capacity: bytes, a multiple of 4096.
        whole: the memory, as bytes; None of a device.
    """

    whole: memoryview | None = None

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = blocks(capacity)
        self._space = Space()
        self._space.extend(0, self.capacity)
        self._read_by_devices = Leaving()

    @property
    def in_use(self) -> int:
        """Bytes leased."""
        self._give_back_what_was_read()
        return self._space.in_use

    @property
    def peak(self) -> int:
        """The most bytes that were leased at a time, since the last `restart_peak`."""
        return self._space.peak

    @property
    def touched(self) -> int:
        """Bytes that were leased at any time since the last `restart_peak`: so many may be resident."""
        return self._space.touched

    def restart_peak(self) -> None:
        """Measure `peak` and `touched` from now on."""
        self._give_back_what_was_read()
        self._space.restart()

    @abstractmethod
    def _tensor(self, memory: Any, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at `offset`, with a storage and version counter of its own: autograd must not take a
        write to one buffer for a write to another, and views are made by their offset in the storage."""

    def _give_back(self, offset: int, size: int) -> None:
        self._space.give(offset, size)

    def _release_after(self, ticket: Ticket, buffer: Buffer) -> None:
        leaving = self._read_by_devices
        with leaving.lock:
            while leaving and leaving.nbytes + buffer.capacity > _MAX_BYTES_LEAVING:
                leaving.retire()
            leaving.add(ticket, buffer)
            leaving.retire_done()

    def _give_back_what_was_read(self) -> None:
        if self._read_by_devices:
            self._read_by_devices.retire_done()


class Buffer:
    """A leased piece of an arena, with one owner, who releases it once.

    Attributes:
        address: of its first byte.
        nbytes: as asked for; `capacity` is what there is, a multiple of 4096.
    """

    __slots__ = ("__weakref__", "_arena", "_forsaken", "_memory", "_offset", "address", "capacity", "nbytes")

    def __init__(self, arena: Lessor, memory: object, offset: int, address: int, nbytes: int, capacity: int) -> None:
        self._arena = arena
        self._memory: object | None = memory
        self._forsaken = False
        self._offset = offset
        self.address = address
        self.nbytes = nbytes
        self.capacity = capacity

    def tensor(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the memory from byte 0 on."""
        assert self._memory is not None, f"use of a released buffer of {self._arena.name!r}"
        count = math.prod(shape)
        assert count * dtype.itemsize <= self.capacity, (
            f"{tuple(shape)} of {dtype} needs {count * dtype.itemsize} bytes, the buffer has {self.capacity}"
        )
        return self._arena._tensor(self._memory, self._offset, shape, dtype)

    def owning_tensors(self, parts: Iterable[tuple[int, torch.Size, torch.dtype]]) -> list[torch.Tensor]:
        """Tensors over the memory, each from so many bytes on, in this shape and of this dtype. The memory goes back
        when no tensor is over any of it any more, and nobody else is to release it."""
        memory = self._arena.whole[:]  # that the tensors hold, and who shares their storages
        made = [self._arena._tensor(memory, self._offset + start, shape, dtype) for start, shape, dtype in parts]
        finalize(memory, self.release)
        return made

    def release(self) -> None:
        """Gives the memory back to the arena. Tensors over it then show whatever comes next."""
        assert self._memory is not None, f"a buffer of {self._arena.name!r} was released twice"
        self._memory = None
        self._arena._give_back(self._offset, self.capacity)

    def release_after(self, ticket: Ticket) -> None:
        """As `release`, once `ticket`, a copy to a device, is done; waits where many buffers are released like this."""
        self._arena._release_after(ticket, self)

    def release_when_dropped(self) -> None:
        """For an owner who can't wait any more: a transfer under way has this buffer too, and will be the last to."""
        self._forsaken = True

    def __del__(self) -> None:
        if getattr(self, "_forsaken", False) and self._memory is not None:
            with finalizing:
                self.release()
