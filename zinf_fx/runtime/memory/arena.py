"""Arenas: memory that is allocated in buffers, which come back when the last transfer from or to them is done."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zinf_fx.errors import StoreError
from zinf_fx.interrupts import finalizing
from zinf_fx.runtime.finalizers import finalize
from zinf_fx.runtime.memory.device import Device
from zinf_fx.runtime.memory.freelist import Space
from zinf_fx.runtime.memory.host import SLAB, HostMapping, Registry, slabs
from zinf_fx.runtime.memory.transfers import Counters, Ticket
from zinf_fx.sizes import HUGE_PAGE, PAGE, blocks, in_words, round_up

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value: Python names it from 3.13 on

# Bytes of released buffers that a device has still to read before the release of one more waits.
_MAX_BYTES_TO_READ = 256 << 20
_NO_LIMIT = 1 << 60
_PLACES = 8  # of views that are remembered: as a rule, a plan has one for each transfer of the same elements


class ReleaseQueue:
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


class Allocator(ABC):
    """A memory from which buffers are allocated, and how much of it is taken.

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
        self._read_by_device = ReleaseQueue()

    @property
    def in_use(self) -> int:
        """Bytes allocated."""
        self._release_what_was_read()
        return self._space.in_use

    @property
    def peak(self) -> int:
        """The most bytes that were allocated at a time, since the last `restart_peak`."""
        return self._space.peak

    @property
    def touched(self) -> int:
        """Bytes that were allocated at any time since the last `restart_peak`: so many may be resident."""
        return self._space.touched

    def restart_peak(self) -> None:
        """Measure `peak` and `touched` from now on."""
        self._release_what_was_read()
        self._space.restart()

    @abstractmethod
    def _tensor(self, memory: Any, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at `offset`, with a storage and version counter of its own: autograd must not take a
        write to one buffer for a write to another, and views are made by their offset in the storage."""

    def _give_back(self, offset: int, size: int) -> None:
        self._space.give(offset, size)

    def _release_after(self, ticket: Ticket, buffer: Buffer) -> None:
        queue = self._read_by_device
        with queue.lock:
            while queue and queue.nbytes + buffer.capacity > _MAX_BYTES_TO_READ:
                queue.retire()
            queue.add(ticket, buffer)
            queue.retire_done()

    def _release_what_was_read(self) -> None:
        if self._read_by_device:
            self._read_by_device.retire_done()


class Buffer:
    """A piece of an arena, with one owner, who releases it once.

    Attributes:
        address: of its first byte.
        nbytes: as asked for; `capacity` is what there is, a multiple of 4096.
    """

    __slots__ = ("__weakref__", "_arena", "_forsaken", "_memory", "_offset", "address", "capacity", "nbytes")

    def __init__(self, arena: Allocator, memory: object, offset: int, address: int, nbytes: int, capacity: int) -> None:
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
        assert self._arena.whole is not None
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
        """Release the buffer once `ticket`, a copy to a device, is done. It waits where many buffers do."""
        self._arena._release_after(ticket, self)

    def release_when_dropped(self) -> None:
        """For an owner who can't wait any more: a transfer under way has this buffer too, and will be the last to."""
        self._forsaken = True

    def __del__(self) -> None:
        if getattr(self, "_forsaken", False) and self._memory is not None:
            with finalizing:
                self.release()


class Arena(Allocator):
    """A tier's transfer memory: one reserved range, allocated in pieces.

    The range costs address space only; memory becomes resident when it is first written, in huge pages where the
    system grants them, and stays so for the next buffer until `trim`. A process made by fork doesn't have the range:
    touching it there is a segmentation fault, and direct I/O into it never races with copy-on-write.

    A region of it can be set apart for buffers whose places in it are planned. Others go elsewhere while they can.

    Args:
        name: the tier, for messages.
        capacity: bytes, rounded up to 4096.
        option: the option that enlarges it, for messages.
    """

    def __init__(self, name: str, capacity: int, *, option: str = "host_memory") -> None:
        super().__init__(name, capacity)
        self.option = option
        self._region = range(0)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._map = HostMapping(-1, self.capacity + SLAB, flags=flags)
        except OSError as error:
            hint = f"no address space for the arena; lower {option}, or raise the process's limit (ulimit -v, -d)"
            raise StoreError("reserve", name, hint, length=capacity, errno=error.errno) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._base = round_up(address, SLAB) - address
        self._address = address + self._base
        self.whole = memoryview(self._map)
        self._map.madvise(mmap.MADV_DONTFORK)
        if self.capacity >= HUGE_PAGE:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE, self._base, self.capacity)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel without transparent huge pages
                    raise

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of at least `nbytes` bytes: the size rounded up to 4096, aligned to that, or to 2 MiB from 2 MiB on.

        Waits for buffers that a device still reads when there is no room without them.

        Raises:
            StoreError: the arena is exhausted, or too fragmented.
        """
        size = blocks(max(nbytes, 1))
        alignment = HUGE_PAGE if size >= HUGE_PAGE else PAGE
        self._release_what_was_read()
        offset = self._take(size, alignment)
        while offset is None and self._read_by_device:
            self._read_by_device.retire()
            offset = self._take(size, alignment)
        if offset is None:
            raise StoreError(
                "allocate",
                self.name,
                f"{in_words(nbytes)} asked for, {in_words(self.in_use)} of {in_words(self.capacity)} allocated, "
                f"largest free piece {in_words(self._space.largest)}; raise {self.option}",
            )
        return self._buffer(offset, nbytes, size)

    def allocate_in(self, room: range, nbytes: int) -> Buffer | None:
        """A buffer in a part of the region, aligned to 4096; None if there is no room in it.

        Huge pages are the arena's, so that direct I/O is as fast from wherever in it a buffer begins.
        """
        start, size = self._region.start, blocks(max(nbytes, 1))
        self._release_what_was_read()
        offset = self._space.take(size, PAGE, range(start + room.start, min(start + room.stop, self._region.stop)))
        return None if offset is None else self._buffer(offset, nbytes, size)

    def allocate_again(self, buffer: Buffer) -> Buffer | None:
        """The place of a buffer that was released, if it is free."""
        offset = buffer.address - self._address
        free = self._space.take(buffer.capacity, PAGE, range(offset, offset + buffer.capacity))
        return None if free is None else self._buffer(free, buffer.nbytes, buffer.capacity)

    def lies_in(self, room: range, buffer: Buffer) -> bool:
        """Whether any of a buffer lies in a part of the region."""
        start = buffer.address - self._address - self._region.start
        return start < room.stop and start + buffer.capacity > room.start

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's elements are in this memory."""
        return not tensor.numel() or 0 <= tensor.data_ptr() - self._address < self.capacity

    def reserve(self, nbytes: int) -> None:
        """Have a region of at least so many bytes, if the arena has that much in one piece; whatever is allocated in it
        stays there."""
        if nbytes <= len(self._region):
            return
        old = self._region
        more = range(old.stop, old.start + nbytes)
        for alignment, within in ((PAGE, more), (HUGE_PAGE, None), (PAGE, None)):
            size = len(more) if within is not None else nbytes
            start = self._space.take(size, alignment, within)
            if start is not None:
                self._space.give(start, size)
                self._region = range(start if within is None else old.start, start + size)
                return

    def serve(self, registry: Registry) -> None:
        """From now on, register with a device what is allocated."""
        self._map.serve(registry)

    def trim(self) -> None:
        """Gives the memory of free pieces outside the region back to the system. Their next use pays for new pages.

        What is registered with a device stays: the device would go on with the old pages.
        """

        def give_back(start: int, end: int) -> None:
            for low, high in ((start, min(end, self._region.start)), (max(start, self._region.stop), end)):
                for first, last in slabs(self._address + low, high - low):
                    if not self._map.knows(first):
                        self._map.madvise(mmap.MADV_DONTNEED, self._base + first - self._address, last - first)

        self._space.visit_free(give_back)

    def _take(self, size: int, alignment: int) -> int | None:
        outside = range(0, self._region.start), range(self._region.stop, self.capacity)
        for within in (*outside, None) if self._region else (None,):
            offset = self._space.take(size, alignment, within)
            if offset is not None:
                return offset
        return None

    def _buffer(self, offset: int, nbytes: int, size: int) -> Buffer:
        self._map.use(self._address + offset, size, self._address + self.capacity)
        return Buffer(self, self._map, offset, self._address + offset, nbytes, size)

    def _tensor(self, memory: mmap.mmap, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # what stays may be written in another mode
                return self._tensor(memory, offset, shape, dtype)
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=self._base + offset)
        return flat if len(shape) == 1 else flat.resize_(shape)  # faster than a view, which is a tensor more


class DeviceArena(Allocator):
    """One region of a device's memory, taken from PyTorch's allocator once, for buffers at the places that are planned.

    Where somebody else has a place, the buffer lies elsewhere: in memory of PyTorch's own, which goes when it is
    released. See [Note: order on a device].

    Raises: StoreError when PyTorch has no room for the region.
    """

    def __init__(self, device: Device, nbytes: int, counters: Counters) -> None:
        super().__init__(str(device.torch_device), nbytes)
        self._device, self._counters = device, counters
        self._elsewhere = Space()  # has no limit, and begins behind the region
        self._elsewhere.extend(self.capacity, _NO_LIMIT)
        try:
            self._memory = _allocate(self.capacity, device.torch_device)
        except torch.OutOfMemoryError as error:
            raise StoreError(
                "reserve",
                self.name,
                "there is no room for the plan's tiles in flight in one piece; "
                f"give the plan less with device_memory. PyTorch says: {error}",
                length=nbytes,
            ) from error

    def allocate(self, offset: int, nbytes: int) -> Buffer:
        """A buffer of at least `nbytes` bytes at `offset`, or elsewhere."""
        size = blocks(max(nbytes, 1))
        start = self._space.take(size, PAGE, range(offset, offset + size))
        if start is not None:
            self._counters.placed += 1
            self._device.take_over(self._memory)
            return Buffer(self, self._memory, start, self._memory.data_ptr() + start, nbytes, size)
        self._counters.displaced += 1
        memory = _allocate(size, self._device.torch_device)
        behind = self._elsewhere.take(size, PAGE)
        assert behind is not None  # it has no end
        return Buffer(self, memory, behind, memory.data_ptr(), nbytes, size)

    @property
    def in_use(self) -> int:
        """Bytes allocated, elsewhere too."""
        return super().in_use + self._elsewhere.in_use

    @property
    def touched(self) -> int:
        """Bytes of the region that were allocated at any time since the last `restart_peak`, and the most that lay
        elsewhere at a time."""
        return super().touched + self._elsewhere.peak

    def restart_peak(self) -> None:
        """Measure `peak` and `touched` from now on."""
        super().restart_peak()
        self._elsewhere.restart()

    def _tensor(self, memory: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        start = offset if memory is self._memory else 0
        storage = memory.untyped_storage()[start : start + math.prod(shape) * dtype.itemsize]
        with torch.inference_mode(False):
            flat = torch.empty(0, dtype=dtype, device=memory.device)
            return flat.set_(storage, 0, shape)  # pyright: ignore[reportCallIssue]  (the strides may be left out)

    def _give_back(self, offset: int, size: int) -> None:
        (self._space if offset < self.capacity else self._elsewhere).give(offset, size)


def _allocate(nbytes: int, torch_device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it may be written in another mode
        return torch.empty(nbytes, dtype=torch.uint8, device=torch_device)


class CachedViews:
    """Where tensors begin and end in memory that comes to lie at few places of an arena, again and again: at each, the
    tensors over it are made once."""

    def __init__(self, parts: Sequence[slice], shapes: Sequence[tuple[int, ...]] | None = None) -> None:
        """`parts`: the elements of each tensor; `shapes`: of the tensors, which are flat by default."""
        self._parts, self._shapes = parts, shapes
        self._known: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def of(self, memory: torch.Tensor, arena: Arena) -> list[torch.Tensor]:
        """The tensors over flat memory. They serve whoever has the memory next, too, if it is the arena's."""
        place = memory.data_ptr(), memory.dtype
        if (known := self._known.get(place)) is not None:
            return known
        with torch.inference_mode(False), torch.no_grad():
            tensors = [memory[part] for part in self._parts]
            if self._shapes is not None:
                tensors = [tensor.view(shape) for tensor, shape in zip(tensors, self._shapes, strict=True)]
        if arena.holds(memory) and memory.numel():
            if len(self._known) == _PLACES:
                self._known.clear()
            self._known[place] = tensors
        return tensors
