"""Where the bytes of a stored tensor live, and how a part of them is brought to where it is worked on, and back."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch

from zinf_fx.config import Tier
from zinf_fx.errors import StoreError
from zinf_fx.interrupts import held_back
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.memory.leases import Buffer, Ticket
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.remains import when_gone
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.runtime.tensor.windows import DeviceWindow, Under, Window, forget_what_is_done
from zinf_fx.runtime.tensor.write_queue import DelayedWrite
from zinf_fx.sizes import PAGE


class StoredBytes:
    """Elements, flat, on one tier, of which windows show parts in memory.

    Whoever looks at them asks `TensorStorage.settled`, unless nothing in the background can be about to change them.

    `token` stands for them in graphs: its version counter counts the writes. `reads` are the transfers under way from
    where they live. `followers` are windows for reading that stay in memory, and which every write to the store changes
    too.
    """

    def __init__(
        self, tiers: Tiers, tier: Tier, count: int, dtype: torch.dtype, device: Device, token: torch.Tensor
    ) -> None:
        """Reserve space on `tier`. Raises: StoreError when there is not enough, before anything else is changed."""
        self.tiers, self.tier, self.device, self.token = tiers, tier, device, token
        self.count, self.dtype = count, dtype
        self.nbytes = count * dtype.itemsize
        self.followers: weakref.WeakSet[Window] = weakref.WeakSet()
        # What is under way between where the bytes live and anywhere else.
        self._writes: Under = []
        self.reads: Under = []
        self._order = threading.RLock()  # while a transfer finds out what it is to follow, until others see it
        self._extent = None
        self._in_host: torch.Tensor | None = None  # the bytes, where the CPU can work on them
        self.on_device: torch.Tensor | None = None  # the bytes, where the device can
        if not device.in_host_memory:
            tiers.host.serve(device)
        if tier == "nvme":
            self._extent = tiers.store.allocate(self.nbytes)
            self._at_end(tiers.store.free, self._extent)
        elif tier == "host":
            buffer = tiers.lease(self.nbytes)
            self._in_host = buffer.tensor((count,), dtype)
            self._at_end(buffer.release)
        else:
            with torch.inference_mode(False):
                self.on_device = torch.empty(count, dtype=dtype, device=device.torch_device)
        if device.in_host_memory:
            self._in_host = self.on_device = self._in_host if tier == "host" else self.on_device

    @property
    def in_memory(self) -> torch.Tensor:
        """All of them, where they live: on the device or in host memory."""
        memory = self.on_device if self.on_device is not None else self._in_host
        assert memory is not None, "only tensors in memory are updated in shares"
        return memory

    @property
    def in_host_memory(self) -> bool:
        """Whether they live in host memory, so that `window` gives them themselves."""
        return self._in_host is not None

    @property
    def version(self) -> int:
        """How often they were written."""
        return self.token._version

    def window(
        self, start: int = 0, count: int | None = None, *, load: bool = True, offset: int | None = None
    ) -> Window:
        """`count` of the elements, from `start` on (default all), in host memory; if they are moved there, to where
        `offset` says (see `Tiers.lease`).

        With `load`, reading them starts at once; without, their values are undefined until written. The store moves
        whole blocks: what a window has in common with its neighbours' blocks is read in any case, and written back.
        Both ends on multiples of WINDOW_ALIGNMENT (or at the end) spare that.
        """
        count = self._count(start, count)
        if self._in_host is not None:
            self._settle(range(start, start + count))
            return Window(self, start, self._in_host[start : start + count], None, None)
        per_block = PAGE // self.dtype.itemsize if self._extent is not None else 1
        first = start // per_block * per_block
        end = min(-(-(start + count) // per_block) * per_block, self.count) if count else first
        shared = first < start or end > start + count
        buffer = self.tiers.lease((end - first) * self.dtype.itemsize, offset)
        try:
            memory = buffer.tensor((end - first,), self.dtype)
            ticket = self.read(first, memory, buffer) if (load or shared) and count else None
        except BaseException:
            buffer.release()
            raise
        return Window(self, first, memory, buffer, ticket, slice(start - first, start - first + count))

    def device_window(
        self, start: int = 0, count: int | None = None, *, load: bool = True, offset: int | None = None
    ) -> Window | DeviceWindow:
        """As `window`, in device memory. `offset` is where in host memory they pass through."""
        count = self._count(start, count)
        if self.on_device is not None:
            return Window(self, start, self.on_device[start : start + count], None, None)
        host = self.window(start, count, load=load, offset=offset)
        if self.device.in_host_memory:
            return host
        arena = self.tiers.device_arenas.get(self.device)
        return DeviceWindow(host, self.device, count, self.dtype, load, arena)

    def read(self, start: int, memory: torch.Tensor, owner: object) -> Ticket:
        """Start reading the elements from `start` on into `memory`, in `owner`'s buffer."""
        count = memory.numel()
        if self.on_device is not None:
            return self.device.download(self.on_device[start : start + count], memory)
        elements = range(start, start + count)
        itemsize = self.dtype.itemsize
        offset, nbytes = start * itemsize, count * itemsize
        with self._order:
            self._settle(elements)
            ticket = self.tiers.store.read(self._extent, memory.data_ptr(), offset, nbytes, owner=owner)
            forget_what_is_done(self.reads)
            self.reads.append((elements, ticket))
        return ticket

    @held_back
    @torch.no_grad()
    def set(self, value: torch.Tensor, offset: int | None = None) -> None:
        """Write all elements from a tensor of as many (any shape; converted to this dtype); `offset` as for `window`.

        From the device, the write may be under way when this returns: the caller may drop `value`, but not change it.
        """
        if self.on_device is not None:
            with self.noted(value.nbytes):
                self.on_device.view(value.shape).copy_(value)
            self.written()
        elif self._in_host is not None:
            earlier = [ticket for _, ticket in (*self._writes, *self.reads)]
            copy = self.device.download(value, self._in_host, after=earlier)
            self._writes.clear()
            self.written((range(self.count), copy))
        else:
            window = self.window(load=False, offset=offset)
            try:
                copy = self.device.download(value, window.wait())
            except BaseException:
                window.close()
                raise
            window.store(after=copy)

    def noted(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """For a block in which the CPU copies a value to where it lives; other devices' copies note themselves."""
        leaves = self.tier != "device" and self.device.in_host_memory
        return RECORDER.work("offload", nbytes, CPU.torch_device) if leaves else contextlib.nullcontext()

    def written(self, after: tuple[range, Ticket] | None = None) -> None:
        """Count a write made to bytes in place or through a window, which is over when `after` is."""
        if after is not None:
            self._writes.append(after)
        torch.autograd.graph.increment_version(self.token)

    def announce_write(self) -> None:
        """Count a write that work in the background will make. Followers will have it when they are looked at."""
        followers = self.present_followers()
        self.written()
        for follower in followers:
            follower.version = self.version

    def present_followers(self) -> list[Window]:
        """The followers that have had every write so far."""
        return [f for f in self.followers if f.open and f.version == self.version]

    def write_back(self, start: int, memory: torch.Tensor, buffer: Buffer, after: Ticket | None) -> None:
        """Start writing elements to where they live, once `after` is done; takes over their memory, `buffer`."""
        elements = range(start, start + memory.numel())
        offset, nbytes = start * self.dtype.itemsize, memory.nbytes
        try:
            if self.on_device is not None:
                upload = self.device.upload(self.on_device[elements.start : elements.stop])
                upload.start(memory)
                upload.join()
                buffer.release_after(upload)
                return
            write = partial(self.tiers.store.write, self._extent, buffer.address, offset, nbytes)
            with self._order:
                self._settle(elements)
                self.await_reads(elements)
                ticket: Ticket = write() if after is None or after.done() else DelayedWrite(after, write)
                self._writes.append((elements, ticket))
        except BaseException:
            buffer.release()
            raise
        self.tiers.writes.add(ticket, buffer, self)

    def await_reads(self, elements: range) -> None:
        """Wait until neither the disk nor the device reads what is to change."""
        _await([ticket for read, ticket in list(self.reads) if _overlap(read, elements)])

    def flush(self) -> None:
        """Wait for the writes under way. Raises: StoreError when one failed: its bytes are lost."""
        self._settle(range(self.count))

    def _count(self, start: int, count: int | None) -> int:
        count = self.count - start if count is None else count
        assert start >= 0 and count >= 0 and start + count <= self.count, (start, count, self.count)
        return count

    def _at_end(self, release: Callable[..., None], *arguments: object) -> None:
        """Call `release` when this is gone, and nothing is under way to or from it: what comes next in its place must
        not be overtaken. Not at exit, when the whole scratch directory goes, nor in a process made by fork, where
        nothing is to be given back."""
        when_gone(self, partial(_release, os.getpid(), self._writes, self.reads, release, *arguments))

    def _settle(self, elements: range) -> None:
        """The store promises no order: what touches `elements` follows the writes to them that are under way."""
        for one in list(self._writes):
            written, ticket = one
            if _overlap(written, elements) or ticket.done():
                ticket.wait()  # a failed write stays: these bytes are lost, and every later access says so
                with contextlib.suppress(ValueError):  # another thread waited too
                    self._writes.remove(one)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _await(tickets: Iterable[Ticket]) -> None:
    """Until they are over. A failed read concerns only who asked for the values; `Tiers` reports failed writes."""
    for ticket in tickets:
        with contextlib.suppress(StoreError):
            ticket.wait()


def _release(pid: int, writes: Under, reads: Under, release: Callable[..., None], *arguments: object) -> None:
    if os.getpid() != pid:
        return
    _await(ticket for _, ticket in (*reads, *writes))
    release(*arguments)
