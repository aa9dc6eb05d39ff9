"""Windows: consecutive elements of one storage in memory where they can be worked on, for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from threading import RLock
from typing import ClassVar, Protocol

import torch

from zinf_fx.errors import StoreError
from zinf_fx.interrupts import sealed
from zinf_fx.plan.intervals import common, overlap
from zinf_fx.runtime.lifecycle import Lifecycle
from zinf_fx.runtime.memory.arena import Buffer, DeviceArena
from zinf_fx.runtime.memory.device import Device, Upload
from zinf_fx.runtime.memory.transfers import JoinedTicket, Ticket
from zinf_fx.runtime.tensor.allocation import Allocation, Follower, forget_what_is_done


class Owner(Protocol):
    """The bytes that a window shows a part of."""

    allocation: Allocation

    def write_back(self, first: int, memory: torch.Tensor, buffer: Buffer, after: Ticket | None) -> None:
        """Start writing elements to where they live, once `after` is done, and release the buffer in the end."""

    def written(self) -> None:
        """Count a write."""


class WindowState(Enum):
    """What has become of the elements of a window."""

    READING = "being read"  # to host memory, or there without having been waited for
    PLACED = "given room on the device"  # the copy to which has not begun
    OPEN = "open"
    STORED = "stored"
    CLOSED = "closed"


READING, PLACED, OPEN, STORED, CLOSED = WindowState


class _Lifecycle(Lifecycle):
    what = "window"
    following: ClassVar = {
        READING: (PLACED, OPEN, CLOSED),
        PLACED: (OPEN, CLOSED),
        OPEN: (STORED, CLOSED),
        STORED: (),
        CLOSED: (),
    }

    @property
    def is_over(self) -> bool:
        """Whether it was stored or closed."""
        return self.state is STORED or self.state is CLOSED


class Window(_Lifecycle):
    """Consecutive elements where no copy to or from a device is needed: wait, use, then `store` or `close`, once."""

    def __init__(
        self,
        storage: Owner,
        start: int,
        memory: torch.Tensor,
        buffer: Buffer | None,
        ticket: Ticket | None,
        meant: slice = slice(None),
    ) -> None:
        """`memory` has whole blocks, from element `start` of the allocation on; without a buffer, it is where the
        elements live. `meant` are the elements asked for among them. `ticket` is that of their read; None: there is
        nothing to read."""
        self.state = OPEN if ticket is None else READING
        self._storage: Owner | None = storage  # None: for reading alone
        self._reads = storage.allocation.reads
        self._start = start
        self._elements = range(start, start + memory.numel())
        self._memory, self._buffer, self._ticket = memory, buffer, ticket
        self._meant = meant
        self._reader: Ticket | None = None
        self._closing = RLock()  # held while a follower takes over elements, too
        self.version: int | None = storage.allocation.version
        """Of what lives there, when they were read or, for a follower, written; None after a failed write."""

    def read_only(self) -> Window:
        """Return this window, which can't be stored any more, and doesn't keep the storage alive."""
        self._storage = None
        return self

    def follow(self, storage: Owner) -> None:
        """Take over what is written to the store from now on: nothing to do where the elements live."""
        if self._buffer is not None:
            storage.allocation.follow(self)

    def take_over(self, start: int, written: torch.Tensor) -> None:
        """As a `Follower`."""
        with self._closing:
            if not self.is_over:
                self.arrived()
                shared = common(self._elements, range(start, start + written.numel()))
                _part(self._memory, self._start, shared).copy_(_part(written, start, shared))

    def upload(self, offset: int | None = None) -> None:
        """Nothing to copy."""

    @property
    def first(self) -> int:
        """The first of the elements asked for, in the allocation."""
        return self._start + (self._meant.start or 0)

    @property
    def elements(self) -> range:
        """The elements of the allocation that are here, in whole blocks."""
        return self._elements

    @property
    def is_current(self) -> bool:
        """Whether nothing was written to where they live since they were read."""
        if self._buffer is None:
            return True
        assert self._storage is not None
        return self.version == self._storage.allocation.version

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        if self.state is not READING:
            return True
        assert self._ticket is not None
        return self._ticket.done()

    def wait(self) -> torch.Tensor:
        """Return the elements, 1-D, once they are there; valid until `store` or `close`."""
        memory = self.arrived()
        if self._storage is not None and self._buffer is None:
            self._storage.allocation.await_reads(self._elements)
        return memory

    def arrived(self) -> torch.Tensor:
        """Return the elements, 1-D, once they are there, but not to be changed before their `readers` are done."""
        if self.state is READING:
            assert self._ticket is not None
            self._ticket.wait()
            self.become(OPEN)
        assert self.state is OPEN, f"a window was used that is {self.state.value}"
        return self._memory[self._meant]

    @property
    def readers(self) -> list[Ticket]:
        """What reads the elements where they live, if `arrived` gives these."""
        return [ticket for _, ticket in self._reads] if self._buffer is None else []

    def read_by(self, reader: Ticket) -> None:
        """Note that something besides the caller reads the elements until it is done."""
        if self._buffer is None:
            forget_what_is_done(self._reads)
            self._reads.append((self._elements, reader))
        self._reader = reader

    def store(self, after: Ticket | None = None) -> None:
        """Start writing the elements back, once `after` is done; where they live, there is nothing to move."""
        assert self._storage is not None, "a window for reading can't be stored"
        if after is not None and after.done():
            after = None
        self.arrived()
        followers = self._storage.allocation.present_followers()
        readers = self._hand_over(followers, after)
        self.become(STORED)
        if self._buffer is None:
            if after is not None:
                self._storage.allocation.changed_by(self._elements, after)
        elif self._elements:
            before = readers if after is None else [after, *readers]
            self._storage.write_back(self._start, self._memory, self._buffer, JoinedTicket(before) if before else None)
        else:
            self._buffer.release()
        self._storage.written()
        for follower in followers:
            follower.version = self._storage.allocation.version

    def _hand_over(self, followers: Sequence[Follower], after: Ticket | None) -> list[Ticket]:
        """Let followers take over what is about to be written, once `after` is done. Returns what still reads it."""
        concerned = [follower for follower in followers if overlap(follower.elements, self._elements)]
        if concerned and after is not None:
            after.wait()
        for follower in concerned:
            follower.version = None
        readers = []
        for follower in concerned:
            reader = follower.take_over(self._start, self._memory)
            if reader is not None:
                self.read_by(reader)
                readers.append(reader)
        return readers

    @sealed
    def close(self) -> None:
        """Give the memory back without writing. A read under way is waited for: its buffer is not free before."""
        with self._closing:
            if self.is_over:
                return
            was_read = self.state is not READING
            self.become(CLOSED)
        if not was_read:
            assert self._ticket is not None and self._buffer is not None
            try:
                self._ticket.wait()
            except StoreError:
                pass  # whoever needed the values has waited for them, and knows
            except BaseException:  # Ctrl-C that lost its patience
                self._buffer.release_when_dropped()
                raise
        if self._buffer is not None:
            self._buffer.release() if self._reader is None else self._buffer.release_after(self._reader)


class DeviceWindow(_Lifecycle):
    """A window in device memory, over elements that live elsewhere and are copied through a `Window` in host memory."""

    _copy: Upload  # from PLACED on

    def __init__(
        self, host: Window, device: Device, count: int, dtype: torch.dtype, load: bool, arena: DeviceArena | None
    ) -> None:
        """`load` says whether the elements are to be copied to the device."""
        self.state = READING
        self._host, self._device, self._arena = host, device, arena
        self._count, self._dtype, self._load = count, dtype, load
        self._read_only = False
        self._first = host.first  # of the elements, in the allocation
        self._taken_over: deque[Upload] = deque()  # what nobody has waited for yet
        self._closing = RLock()  # held while it takes over elements, too
        self._buffer: Buffer | None = None  # of the arena, if that has a place for them

    def read_only(self) -> DeviceWindow:
        """Return this window as `Window.read_only` does. Host memory is given back as soon as the elements are on the
        device."""
        self._host.read_only()
        self._read_only = True
        return self

    @property
    def version(self) -> int | None:
        """The version of the storage's bytes when they were read or, for a follower, written; None after a failed
        write."""
        return self._host.version

    @version.setter
    def version(self, version: int | None) -> None:
        self._host.version = version

    @property
    def is_current(self) -> bool:
        """As of a `Window`."""
        return self._host.is_current

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._host.ready

    def follow(self, storage: Owner) -> None:
        """Take over what is written to the store from now on, or where the elements live in host memory."""
        storage.allocation.follow(self)

    @property
    def elements(self) -> range:
        """The elements of the allocation that are here."""
        return range(self._first, self._first + self._count)

    def take_over(self, start: int, written: torch.Tensor) -> Ticket | None:
        """As a `Follower`. What is computed from now on is computed with the new elements once it has waited."""
        with self._closing:
            if self.is_over:
                return None
            value = self.wait()
            shared = common(self.elements, range(start, start + written.numel()))
            copy = self._device.upload(_part(value, self._first, shared))
            copy.start(_part(written, start, shared))
            self._taken_over.append(copy)
            return copy

    def upload(self, offset: int | None = None) -> None:
        """Take device memory, and start the copy to it: now or, if the elements are not in host memory yet, in `wait`.

        Either way the copy follows what the device was told to compute before now, and not what it is told meanwhile.
        `offset` is where a plan has a place for the elements in the device's arena; it is for reading only, because the
        values must not outlive the window.
        """
        if self.state is READING:
            self._copy = self._device.upload(self._place(offset))
            self.become(PLACED if self._load else OPEN)
        if self.state is PLACED and self._host.ready:
            self._start()

    def wait(self) -> torch.Tensor:
        """Return the elements, 1-D, for what the device computes from now on; valid until `store` or `close`."""
        with self._closing:
            self.upload()
            if self.state is PLACED:
                self._start()
            assert self.state is OPEN, f"a window was used that is {self.state.value}"
            if self._load:
                self._copy.join()
            while self._taken_over:
                copy = self._taken_over.popleft()
                copy.join()
                copy.drop()
            value = self._copy.value
            assert value is not None
            return value

    def arrived(self) -> None:
        """Wait until the elements are in host memory."""
        self._host.arrived()

    def store(self) -> None:
        """Start writing the elements back."""
        assert not self._read_only, "a window for reading can't be stored"
        host = self._device.download(self.wait(), self._host.arrived(), after=self._host.readers)
        self._copy.drop()
        self._host.store(host)
        self.become(STORED)

    def close(self) -> None:
        """Give the memory back without writing."""
        with self._closing:
            if self.is_over:
                return
            if self.state is not READING:
                while self._taken_over:
                    self._taken_over.popleft().drop()
                self._copy.drop()
            self.become(CLOSED)
        if self._buffer is not None:
            self._buffer.release()  # after the drop, which the next copy to this place is to follow
        self._host.close()

    def _place(self, offset: int | None) -> torch.Tensor:
        if offset is None or self._arena is None:
            with torch.inference_mode(False):  # it may be written in another mode
                return torch.empty(self._count, dtype=self._dtype, device=self._device.torch_device)
        assert self._read_only
        self._buffer = self._arena.allocate(offset, self._count * self._dtype.itemsize)
        return self._buffer.tensor((self._count,), self._dtype)

    def _start(self) -> None:
        self._copy.start(self._host.arrived())
        self.become(OPEN)
        self._host.read_by(self._copy)
        if self._read_only:
            self._host.close()


def _part(memory: torch.Tensor, first: int, elements: range) -> torch.Tensor:
    """Return some elements of `memory`, which has those from `first` on."""
    return memory[elements.start - first : elements.stop - first]
