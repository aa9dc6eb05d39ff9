"""Memory or space of one tier that a group of stored tensors lives in, and what is under way to and from it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, assert_never

import torch

from zinf_fx.config import Tier
from zinf_fx.errors import StoredTensorError, StoreError
from zinf_fx.plan.intervals import overlap
from zinf_fx.plan.packs import starts_of
from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.disk.read_only import FileExtent
from zinf_fx.runtime.finalizers import finalize
from zinf_fx.runtime.memory.arena import Arena, Buffer
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.memory.transfers import Ticket, all_started, joined
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.runtime.tensor.write_queue import DelayedWrite
from zinf_fx.sizes import PAGE

_FOR_PLANNING = "this tensor was made for planning only and has no values: offload a real model to run it"

Under = list[tuple[range, Ticket]]
"""Transfers under way, and the elements that they are about."""


def forget_what_is_done(under: Under) -> None:
    """Remove what is over. Another thread may add to the list meanwhile, or remove the same."""
    for transfer in [transfer for transfer in under if transfer[1].done()]:
        with contextlib.suppress(ValueError):
            under.remove(transfer)


class Follower(Protocol):
    """A window for reading that stays in memory, and takes over what is written to where its elements live."""

    @property
    def version(self) -> int | None:
        """The version of the allocation that it has; None, which no allocation has, after a write that failed."""
        ...

    @version.setter
    def version(self, version: int | None) -> None: ...

    @property
    def elements(self) -> range:
        """The elements of the allocation that it has."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it was closed."""
        ...

    def take_over(self, start: int, written: torch.Tensor) -> Ticket | None:
        """Take over the elements from `start` of the allocation on that are about to be written. Returns what still
        reads them, if anything."""


class Change(NamedTuple):
    """Elements that change where they live, until when, and the memory that they are written from, if that has their
    values already."""

    elements: range
    ticket: Ticket
    source: torch.Tensor | None = None


class Allocation:
    """Where the tensors of a group live on one tier, until nobody has any of them.

    [Note: groups]
    The tensors in an allocation are a group: of one dtype, on one tier and device, in an order that never changes. Each
    begins with a block of the store. Small parameters that are stored at once are such a group, and so are their
    gradients and each of their states; whatever is alone is a group of one. A tensor that gets other bytes, because it
    is converted, replaced or copied, is a member of another group from then on, and leaves a gap. So whether tensors
    live side by side, and move in one transfer, is seen from their numbers: they are a run of members of one group.

    Attributes:
        tier, dtype: the tier and the dtype of all members.
        device: the device that computes with them.
        counts, starts: how many elements each member has, and where it begins.
        count: how many elements there are, with what lies between members.
        in_store: the bytes on disk; None on other tiers.
        reads: the transfers under way from here.
        version: how often anything here was written.
        is_reused: whether the memory goes back and is acquired again: see `release_with`.
    """

    def __init__(
        self,
        tiers: Tiers,
        tier: Tier,
        counts: Sequence[int],
        dtype: torch.dtype,
        device: Device,
        in_file: FileExtent | None = None,
        on_device: torch.Tensor | None = None,
    ) -> None:
        """Reserve it for members of so many elements each. `in_file` says where the elements are already, to be read
        only; `on_device` is the memory where they are already, which is to be this allocation's.

        Raises: StoreError when there is not enough, before anything else is changed.
        """
        tiers.check_process()
        self._describe(tier, counts, dtype, device)
        self._tiers, count = tiers, self.count
        if not device.in_host_memory:
            tiers.host.serve(device)
        if tier == "nvme":
            self.in_store = in_file or CopyOnWrite(tiers.store, count * dtype.itemsize)
            self._at_end(self, self.in_store.free)
        elif tier == "host":
            self._host_buffer = _HostBuffer(tiers.allocate(count * dtype.itemsize))
            self._in_host = self._host_buffer.buffer.tensor((count,), dtype)
            self._at_end(self, self._host_buffer.give_back)
        elif tier == "device":
            with torch.inference_mode(False):
                if on_device is None:
                    on_device = torch.empty(count, dtype=dtype, device=device.torch_device)
            self._on_device = on_device
        else:
            assert_never(tier)
        if device.in_host_memory:
            self._in_host = self._on_device = self._in_host if tier == "host" else self._on_device

    def _describe(self, tier: Tier, counts: Sequence[int], dtype: torch.dtype, device: Device) -> None:
        self.tier: Tier = tier
        self.device, self.dtype, self.counts = device, dtype, tuple(counts)
        self.starts = starts_of(self.counts, dtype)[:-1]
        self.count = self.starts[-1] + self.counts[-1]
        self._tiers: Tiers | None = None
        self._why = ""
        self.version = 0
        self.is_reused = False
        self.reads: Under = []
        self.in_store: CopyOnWrite | FileExtent | None = None
        self._is_sealed = False
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._writes: list[Change] = []
        self._order = threading.RLock()  # while a transfer finds out what it is to follow, until others see it
        self._in_host: torch.Tensor | None = None  # the elements, where the CPU can work on them
        self._on_device: torch.Tensor | None = None  # the elements, where the device can

    @classmethod
    def unreserved(
        cls, tier: Tier, counts: Sequence[int], dtype: torch.dtype, device: Device = CPU, *, why: str = _FOR_PLANNING
    ) -> Allocation:
        """Make an allocation that reserves nothing, for planning. An access to its elements raises `why`."""
        allocation = cls.__new__(cls)
        allocation._describe(tier, counts, dtype, device)
        allocation._why = why
        return allocation

    @property
    def is_reserved(self) -> bool:
        """Whether there are elements; else an access to them raises."""
        return self._tiers is not None

    @property
    def tiers(self) -> Tiers:
        """The memories and the store that it is in. Raises: StoredTensorError where nothing is reserved."""
        if self._tiers is None:
            raise StoredTensorError(self._why)
        return self._tiers

    @property
    def is_read_only(self) -> bool:
        """Whether the elements are a base's: in a file of somebody else, or sealed."""
        return self._is_sealed or isinstance(self.in_store, FileExtent)

    def seal(self) -> None:
        """Let nothing be written here from now on. Every write has arrived."""
        self._is_sealed = True

    def release_with(self, owner: object) -> None:
        """Give the memory in the host arena back when `owner` is gone, until `acquire_again`. Nobody may look at the
        elements meanwhile."""
        self.is_reused = True
        self._at_end(owner, self._release_memory)

    def _release_memory(self) -> None:
        self._host_buffer.give_back()

    def acquire_again(self) -> bool:
        """Have the same memory again after `release_with`, with undefined elements. Returns whether it was free."""
        return self._host_buffer.take_again(self.tiers.host)

    def elements_of(self, members: range) -> range:
        """Return the elements of a run of members, with what lies between them."""
        first, last = members[0], members[-1]
        return range(self.starts[first], self.starts[last] + self.counts[last])

    def in_host(self, elements: range) -> torch.Tensor | None:
        """Return some elements where the CPU can work on them, if they live there: see `_part`."""
        return self._part(self._in_host, elements)

    def on_device(self, elements: range) -> torch.Tensor | None:
        """Return some elements where the device can work on them, if they live there: see `_part`."""
        return self._part(self._on_device, elements)

    def _part(self, memory: torch.Tensor | None, elements: range) -> torch.Tensor | None:
        """Return part of `memory` as a tensor with a version counter of its own: autograd must not take a write to one
        stored tensor for a write to its neighbour."""
        if memory is None or len(elements) == self.count:
            return memory
        with torch.inference_mode(False):
            part = torch.empty(0, dtype=self.dtype, device=memory.device)
            first = memory.storage_offset() + elements.start
            return part.set_(memory.untyped_storage(), first, (len(elements),), (1,))

    def follow(self, window: Follower) -> None:
        """Have every write to the store change a window for reading, too, which stays in memory."""
        with self._order:
            self._followers.add(window)

    def unfollow(self, window: Follower) -> None:
        """Forget a window that is no longer for reading alone."""
        with self._order:
            self._followers.discard(window)

    def present_followers(self) -> list[Follower]:
        """Return the windows that follow, and have had every write so far."""
        with self._order:
            return [window for window in self._followers if not window.is_over and window.version == self.version]

    def read(self, first: int, memory: torch.Tensor, owner: object) -> Ticket:
        """Start reading the elements from `first` on into `memory`, in `owner`'s buffer. What a step in the background
        is writing is copied instead, so that who waits for the step need not wait for the disk, too."""
        with self._order:
            forget_what_is_done(self.reads)
            background = self.tiers.background
            remaining = [range(first, first + memory.numel())]
            if background is not None and not background.asks:
                remaining = self._copy_leaving(first, memory)
            parts = ((elements, memory[elements.start - first : elements.stop - first]) for elements in remaining)
            return joined(all_started(self._read_from_store(elements, part, owner) for elements, part in parts))

    def _read_from_store(self, elements: range, memory: torch.Tensor, owner: object) -> Ticket:
        self.settle(elements)
        assert self.in_store is not None
        offset = elements.start * self.dtype.itemsize
        ticket = self.in_store.read(memory.data_ptr(), offset, memory.nbytes, owner=owner)
        self.reads.append((elements, ticket))
        return ticket

    def _copy_leaving(self, first: int, memory: torch.Tensor) -> list[range]:
        """Copy what is on its way to the store of the elements from `first` on into `memory`. Returns the rest, in
        whole blocks."""
        per_block = PAGE // self.dtype.itemsize
        end = first + memory.numel()
        remaining, start = [], first
        with self.tiers.writes.lock:  # who has it gives buffers back
            leaving = [
                (elements, source)
                for elements, ticket, source in list(self._writes)
                if source is not None and not ticket.done()
            ]
            for elements, source in sorted(leaving, key=lambda change: change[0].start):
                begin, stop = max(elements.start, first), min(elements.stop, end)
                if begin >= stop:
                    continue
                memory[begin - first : stop - first].copy_(source[begin - elements.start : stop - elements.start])
                if start < begin:
                    remaining.append(range(start, begin))
                start = -(-stop // per_block) * per_block  # of its last block, a write has no more to lose
        if start < end:
            remaining.append(range(start, end))
        return remaining

    def write(self, first: int, memory: torch.Tensor, buffer: Buffer, after: Ticket | None) -> None:
        """Start writing elements to the store from their memory, `buffer`, once `after` is done; takes over that.

        Raises: StoreError for what is read-only.
        """
        elements = range(first, first + memory.numel())
        try:
            if self._is_sealed:
                why = "a tensor of a base can't change: load the files into a model of its own with load_safetensors()"
                raise StoreError("write", self.tiers.store.directories[0], why)
            offset = first * self.dtype.itemsize
            assert self.in_store is not None
            write = partial(self.in_store.write, buffer.address, offset, memory.nbytes)
            with self._order:
                self.settle(elements)
                self.await_reads(elements)
                ticket: Ticket = write() if after is None or after.done() else DelayedWrite(after, write)
                self._writes.append(Change(elements, ticket, None if isinstance(ticket, DelayedWrite) else memory))
        except BaseException:
            buffer.release()
            raise
        self.tiers.write(ticket, buffer, self)

    def before_change(self, elements: range) -> list[Ticket]:
        """Return what has to end before the elements are changed where they live."""
        return [transfer[1] for transfer in (*self._writes, *self.reads) if overlap(transfer[0], elements)]

    def is_being_written(self, elements: range) -> bool:
        """Whether a write to some of the elements is under way."""
        return any(overlap(change.elements, elements) and not change.ticket.done() for change in list(self._writes))

    def changed_by(self, elements: range, writer: Ticket) -> None:
        """Note that something changes the elements where they live, behind all that `before_change` gave, until it is
        done."""
        self._writes[:] = [change for change in self._writes if not _contains(elements, change.elements)]
        self._writes.append(Change(elements, writer))

    def await_reads(self, elements: range) -> None:
        """Wait until neither the disk nor the device reads what is to change. A failed read concerns only who asked for
        the values."""
        _await(ticket for read, ticket in list(self.reads) if overlap(read, elements))

    def settle(self, elements: range) -> None:
        """Wait for the writes under way to `elements`: what touches these follows, and the store promises no order.

        Raises: StoreError when one failed: its elements are lost.
        """
        for change in list(self._writes):
            mine = overlap(change.elements, elements)
            if mine or change.ticket.done():
                try:
                    change.ticket.wait()
                except StoreError:  # a failed write stays: its elements are lost, and every later access says so
                    if mine:
                        raise
                else:
                    with contextlib.suppress(ValueError):  # another thread waited too
                        self._writes.remove(change)

    def _at_end(self, owner: object, release: Callable[..., None], *arguments: object) -> None:
        """Call `release` when `owner` is gone, and nothing is under way to or from this: what comes next in its place
        must not be overtaken."""
        finalize(owner, partial(_release, self._writes, self.reads, release, *arguments))


class _HostBuffer:
    """The memory of an allocation in the host arena."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self._is_there = buffer, True

    def give_back(self) -> None:
        """Release the memory, if that has not been done."""
        if self._is_there:
            self._is_there = False
            self.buffer.release()

    def take_again(self, arena: Arena) -> bool:
        """Take the memory again that was given back. Returns whether it was free."""
        buffer = None if self._is_there else arena.allocate_again(self.buffer)
        if buffer is not None:
            self.buffer, self._is_there = buffer, True
        return buffer is not None


def _contains(elements: range, part: range) -> bool:
    return elements.start <= part.start and part.stop <= elements.stop


def _await(tickets: Iterable[Ticket]) -> None:
    """Wait until they are over; `Tiers` reports failed writes."""
    for ticket in tickets:
        with contextlib.suppress(StoreError):
            ticket.wait()


def _release(writes: list[Change], reads: Under, release: Callable[..., None], *arguments: object) -> None:
    _await(transfer[1] for transfer in (*reads, *writes))
    release(*arguments)
