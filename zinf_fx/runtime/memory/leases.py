"""What arenas have in common: their memory is leased in buffers, which come back when the last transfer is done."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from zinf_fx.interrupts import finalizing
from zinf_fx.runtime.memory.freelist import Space, round_up
from zinf_fx.runtime.remains import when_gone
from zinf_fx.sizes import PAGE

# Bytes of released buffers that a device has still to read before the release of one more waits.
_MAX_BYTES_LEAVING = 256 << 20


class Ticket(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Whether it is over."""

    def wait(self) -> None:
        """Returns when it is over."""


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
        self.capacity = round_up(capacity, PAGE)
        self._space = Space()
        self._space.extend(0, self.capacity)
        self._leaving: deque[tuple[Ticket, Buffer]] = deque()
        self._lock = threading.RLock()

    @property
    def in_use(self) -> int:
        """Bytes leased."""
        self._let_go_what_is_done()
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
        self._let_go_what_is_done()
        self._space.restart()

    @abstractmethod
    def _tensor(self, memory: Any, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements at `offset`, flat, as a tensor with a storage and version counter of its own: autograd must
        not take a write to one buffer for a write to another, and views are made by their offset in the storage."""

    def _give_back(self, offset: int, size: int) -> None:
        self._space.give(offset, size)

    def _release_after(self, ticket: Ticket, buffer: Buffer) -> None:
        with self._lock:
            self._leaving.append((ticket, buffer))
            self._let_go_what_is_done()
            while len(self._leaving) > 1 and sum(b.capacity for _, b in self._leaving) > _MAX_BYTES_LEAVING:
                self._let_go()

    def _let_go_what_is_done(self) -> None:
        if not self._leaving:
            return
        with self._lock:
            while self._leaving and self._leaving[0][0].done():
                self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            if self._leaving:
                ticket, buffer = self._leaving[0]
                ticket.wait()
                self._leaving.popleft()
                buffer.release()


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
        """A view of the memory from byte 0 on."""
        assert self._memory is not None, f"use of a released buffer of {self._arena.name!r}"
        count = math.prod(shape)
        assert count * dtype.itemsize <= self.capacity, (
            f"{tuple(shape)} of {dtype} needs {count * dtype.itemsize} bytes, the buffer has {self.capacity}"
        )
        return self._arena._tensor(self._memory, self._offset, count, dtype).view(shape)

    def owning_tensors(self, parts: Iterable[tuple[int, torch.Size, torch.dtype]]) -> list[torch.Tensor]:
        """Tensors over the memory, each from so many bytes on, in this shape and of this dtype. The memory goes back
        when no tensor is over any of it any more, and nobody else is to release it."""
        memory = self._arena.whole[:]  # that the tensors hold, and who shares their storages
        made = [
            self._arena._tensor(memory, self._offset + start, shape.numel(), dtype).view(shape)
            for start, shape, dtype in parts
        ]
        when_gone(memory, self.release)
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
