"""The bytes of a stored tensor, and how a part of them is brought to where it is worked on, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from zinf_fx.errors import StoreError
from zinf_fx.runtime.memory.arena import Buffer
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.memory.host import mapped_empty
from zinf_fx.runtime.memory.transfers import Ticket
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window
from zinf_fx.sizes import PAGE, blocks


class StoredBytes:
    """Elements, flat, of one allocation, of which windows show parts in memory.

    Whoever looks at them asks `TensorStorage.settled`, unless nothing in the background can be about to change them.

    Attributes:
        allocation: the allocation that they lie in.
        members: the run of members of the allocation that they are.
        elements: which elements of the allocation they are.
        tokens: what stands for them in graphs, one for each tensor whose elements they are: a token's version counter
            counts the writes to that tensor.
        on_device: all of them, if they live where the device computes.
    """

    def __init__(self, allocation: Allocation, members: range, tokens: tuple[torch.Tensor, ...]) -> None:
        """See [Note: groups]."""
        self.allocation, self.members, self.tokens = allocation, members, tokens
        self.elements = allocation.elements_of(members)
        self._in_host = allocation.in_host(self.elements)
        self.on_device = self._in_host if allocation.device.in_host_memory else allocation.on_device(self.elements)
        self._prefetched: dict[range, Window] = {}  # by their elements

    def follows(self, other: StoredBytes) -> bool:
        """Whether these are the next members of the same group."""
        return self.allocation is other.allocation and self.members.start == other.members.stop

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.elements)

    @property
    def nbytes(self) -> int:
        """How many bytes they have."""
        return len(self.elements) * self.allocation.dtype.itemsize

    @property
    def in_memory(self) -> torch.Tensor:
        """All of them, where they live: on the device or in host memory."""
        memory = self.on_device if self.on_device is not None else self._in_host
        assert memory is not None, "only tensors in memory are updated in shards"
        return memory

    @property
    def in_host_memory(self) -> bool:
        """Whether they live in host memory, so that `window` gives them themselves."""
        return self._in_host is not None

    def in_memory_of(self, place: Device) -> torch.Tensor | None:
        """Return all of them, if they live where `place` computes: nothing is under way to or from them then."""
        memory = self._in_host if place.in_host_memory else self.on_device
        if memory is not None:
            self.allocation.settle(self.elements)
            self.allocation.await_reads(self.elements)
        return memory

    @property
    def version(self) -> int:
        """How often they were written."""
        return sum(token._version for token in self.tokens)

    def window(
        self, start: int = 0, count: int | None = None, *, load: bool = True, offset: int | None = None
    ) -> Window:
        """Open a window over `count` of the elements, from `start` on (default all), in host memory; if they are moved
        there, to where `offset` says (see `Tiers.allocate`).

        With `load`, reading them starts at once; without, their values are undefined until written. The store moves
        whole blocks: what a window has in common with its neighbours' blocks is read in any case, and written back.
        Both ends on multiples of WINDOW_ALIGNMENT (or at the end) spare that.
        """
        first, end = self._range(start, count)
        if self._in_host is not None:
            self.allocation.settle(range(first, end))
            begin = self.elements.start
            return Window(self, first, self._in_host[first - begin : end - begin], None, None)
        opened, closed = self._in_blocks(first, end)
        buffer = self.allocation.tiers.allocate((closed - opened) * self.allocation.dtype.itemsize, offset)
        return self._window_in(buffer, range(first, end), load)

    def _window_in(self, buffer: Buffer, elements: range, load: bool) -> Window:
        """Open a window over elements of the allocation, in a buffer that has room for their blocks."""
        opened, closed = self._in_blocks(elements.start, elements.stop)
        shared = opened < elements.start or closed > elements.stop
        try:
            memory = buffer.tensor((closed - opened,), self.allocation.dtype)
            ticket = self._read(opened, memory, buffer) if (load or shared) and elements else None
        except BaseException:
            buffer.release()
            raise
        return Window(self, opened, memory, buffer, ticket, slice(elements.start - opened, elements.stop - opened))

    def device_window(
        self, start: int = 0, count: int | None = None, *, load: bool = True, offset: int | None = None
    ) -> Window | DeviceWindow:
        """Open a window as `window` does, in device memory. `offset` is where in host memory they pass through."""
        elements = range(*self._range(start, count))
        if self.on_device is not None:
            first, end = elements.start - self.elements.start, elements.stop - self.elements.start
            return Window(self, elements.start, self.on_device[first:end], None, None)
        host = self._take_prefetched(elements) if load else None
        if host is None:
            self.drop_prefetched(start, len(elements))
            host = self.window(start, count, load=load, offset=offset)
        if self.allocation.device.in_host_memory:
            return host
        return DeviceWindow(
            host,
            self.allocation.device,
            len(elements),
            self.allocation.dtype,
            load,
            self.allocation.tiers.device_arenas.get(self.allocation.device),
        )

    def prefetch(self, start: int, count: int, offset: int | None = None) -> Window | None:
        """Open what the next `device_window` of these elements is, or passes through, in host memory; whoever asked for
        it drops it in the end. None where that would have to wait for something that is under way."""
        elements = range(*self._range(start, count))
        if self.allocation.tier != "nvme" or elements in self._prefetched or self.allocation.is_being_written(elements):
            return None
        opened, closed = self._in_blocks(elements.start, elements.stop)
        buffer = self.allocation.tiers.allocate_at_once((closed - opened) * self.allocation.dtype.itemsize, offset)
        if buffer is None:
            return None
        window = self._prefetched[elements] = self._window_in(buffer, elements, load=True)
        window.follow(self)  # what it has in common with its neighbours' blocks may be written meanwhile
        return window

    def drop_prefetched(self, start: int, count: int) -> None:
        """Close what was prefetched of these elements, if nobody has come for it."""
        window = self._prefetched.pop(range(*self._range(start, count)), None)
        if window is not None:
            self.allocation.unfollow(window)
            window.close()

    def _take_prefetched(self, elements: range) -> Window | None:
        """Return what was prefetched of these elements of the allocation, unless others are there by now."""
        window = self._prefetched.get(elements)
        if window is None or not window.is_current:
            return None
        del self._prefetched[elements]
        self.allocation.unfollow(window)
        return window

    def copied(self, parts: Sequence[range]) -> list[torch.Tensor]:
        """Return ranges of the elements in host memory, to be read: the elements themselves where they live there, else
        copies in memory outside of the arenas. All reads are under way together."""
        if self._in_host is not None:
            return [self.window(part.start, len(part)).wait() for part in parts]
        itemsize = self.allocation.dtype.itemsize
        elements = [range(*self._range(part.start, len(part))) for part in parts]
        read = [range(*self._in_blocks(part.start, part.stop)) for part in elements]
        rooms = [blocks(len(of_part) * itemsize) for of_part in read]  # the last block of all may be a part of one
        memory = [
            room.view(self.allocation.dtype)[: len(of_part)]
            for room, of_part in zip(mapped_empty(sum(rooms)).split(rooms), read, strict=True)
        ]
        tickets = [self._read(of_part.start, into, into) for of_part, into in zip(read, memory, strict=True) if of_part]
        try:
            for ticket in tickets:
                ticket.wait()
        except BaseException:
            for ticket in tickets:
                with contextlib.suppress(StoreError):
                    ticket.wait()
            raise
        return [
            into[part.start - of_part.start : part.stop - of_part.start]
            for part, of_part, into in zip(elements, read, memory, strict=True)
        ]

    def read(self, start: int, memory: torch.Tensor, owner: object) -> Ticket:
        """Start reading the elements from `start` on into `memory`, in `owner`'s buffer."""
        return self._read(self.elements.start + start, memory, owner)

    def _read(self, first: int, memory: torch.Tensor, owner: object) -> Ticket:
        """Start reading as `read` does, from an element of the allocation on."""
        if self.on_device is not None:
            start = first - self.elements.start
            return self.allocation.device.download(self.on_device[start : start + memory.numel()], memory)
        return self.allocation.read(first, memory, owner)

    @torch.no_grad()
    def set(self, value: torch.Tensor, offset: int | None = None) -> None:
        """Write all elements from a tensor of as many (any shape; converted to this dtype). `offset` is that of
        `window`.

        From the device, the write may be under way when this returns: the caller may drop `value`, but not change it.
        """
        if self.on_device is not None:
            with self.noted(value.nbytes):
                self.on_device.view(value.shape).copy_(value)
            self.written()
        elif self._in_host is not None:
            copy = self.allocation.device.download(
                value, self._in_host, after=self.allocation.before_change(self.elements)
            )
            self.allocation.changed_by(self.elements, copy)
            self.written()
        else:
            window = self.window(load=False, offset=offset)
            try:
                copy = self.allocation.device.download(value, window.wait())
            except BaseException:
                window.close()
                raise
            window.store(after=copy)

    def noted(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Open a block in which the CPU copies a value to where it lives; other devices' copies note themselves."""
        leaves = self.allocation.tier != "device" and self.allocation.device.in_host_memory
        return RECORDER.work("offload", nbytes, CPU.torch_device) if leaves else contextlib.nullcontext()

    def written(self) -> None:
        """Count a write made to bytes in place or through a window."""
        self.allocation.version += 1
        torch.autograd.graph.increment_version(self.tokens)

    def write_back(self, first: int, memory: torch.Tensor, buffer: Buffer, after: Ticket | None) -> None:
        """Start writing elements, from one of the allocation on, to where they live, once `after` is done; takes over
        their memory, `buffer`."""
        if self.on_device is None:
            self.allocation.write(first, memory, buffer, after)
            return
        try:
            start = first - self.elements.start
            upload = self.allocation.device.upload(self.on_device[start : start + memory.numel()])
            upload.start(memory)
            upload.join()
            buffer.release_after(upload)
        except BaseException:
            buffer.release()
            raise

    def flush(self) -> None:
        """Wait for the writes under way. Raises: StoreError when one failed: its bytes are lost."""
        self.allocation.settle(self.elements)

    def _in_blocks(self, first: int, end: int) -> tuple[int, int]:
        """Return from which element of the allocation to which one the blocks reach that have those from `first` to
        `end`."""
        per_block = PAGE // self.allocation.dtype.itemsize if self.allocation.tier == "nvme" else 1
        opened = first // per_block * per_block
        return opened, min(-(-end // per_block) * per_block, self.elements.stop) if end > first else opened

    def _range(self, start: int, count: int | None) -> tuple[int, int]:
        """Return the first element of the allocation, and the one behind the last, of `count` from `start` on."""
        count = self.count - start if count is None else count
        assert start >= 0 and count >= 0 and start + count <= self.count, (start, count, self.count)
        first = self.elements.start + start
        return first, first + count


def announce_writes(written: Sequence[StoredBytes]) -> None:
    """Count writes that work in the background will make. Followers will have them when they are looked at."""
    allocations = {stored.allocation for stored in written}
    followers = {allocation: allocation.present_followers() for allocation in allocations}
    torch.autograd.graph.increment_version([token for stored in written for token in stored.tokens])
    for allocation, present in followers.items():
        allocation.version += 1
        for follower in present:
            follower.version = allocation.version


def runs_of(stored: Sequence[StoredBytes]) -> list[list[int]]:
    """Return the numbers of those that live side by side, in the order in which they live there."""
    groups = {group: number for number, group in enumerate(dict.fromkeys(held.allocation for held in stored))}
    runs: list[list[int]] = []
    for number in sorted(range(len(stored)), key=lambda n: (groups[stored[n].allocation], stored[n].members.start)):
        if runs and stored[number].follows(stored[runs[-1][-1]]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def side_by_side(run: Sequence[StoredBytes]) -> StoredBytes:
    """Return the bytes of a run of members, in their order."""
    if len(run) == 1:
        return run[0]
    members = range(run[0].members.start, run[-1].members.stop)
    return StoredBytes(run[0].allocation, members, tuple(token for held in run for token in held.tokens))
