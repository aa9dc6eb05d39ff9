"""Host memory that transfers read into and write from: an arena per tier, and aligned memory that a caller owns."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
from collections.abc import Sequence

import torch

from zinf_fx.errors import StoreError
from zinf_fx.runtime.memory.leases import Buffer, Lessor
from zinf_fx.runtime.memory.mapped import mapped_empty
from zinf_fx.runtime.memory.pinned import SLAB, HostMapping, Registry, slabs
from zinf_fx.sizes import HUGE_PAGE, PAGE, blocks, in_words, round_up

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value: Python names it from 3.13 on


class Arena(Lessor):
    """A tier's transfer memory: one reserved range, leased in pieces.

    The range costs address space only; memory becomes resident when it is first written, in huge pages where the
    system grants them, and stays so for the next lease until `trim`. A process made by fork doesn't have the range:
    touching it there is a segmentation fault, and direct I/O into it never races with copy-on-write.

    A region of it can be set apart for leases whose places in it are planned. Others go elsewhere while they can.

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

    def lease(self, nbytes: int) -> Buffer:
        """A buffer of at least `nbytes` bytes: the size rounded up to 4096, aligned to that, or to 2 MiB from 2 MiB on.

        Waits for buffers that a device still reads when there is no room without them.

        Raises:
            StoreError: the arena is exhausted, or too fragmented.
        """
        size = blocks(max(nbytes, 1))
        alignment = HUGE_PAGE if size >= HUGE_PAGE else PAGE
        self._give_back_what_was_read()
        offset = self._take(size, alignment)
        while offset is None and self._read_by_devices:
            self._read_by_devices.retire()
            offset = self._take(size, alignment)
        if offset is None:
            raise StoreError(
                "lease",
                self.name,
                f"{in_words(nbytes)} asked for, {in_words(self.in_use)} of {in_words(self.capacity)} leased, "
                f"largest free piece {in_words(self._space.largest)}; raise {self.option}",
            )
        return self._buffer(offset, nbytes, size)

    def lease_in(self, room: range, nbytes: int) -> Buffer | None:
        """A buffer in a part of the region, aligned to 4096; None if there is no room in it.

        Huge pages are the arena's, so that direct I/O is as fast from wherever in it a buffer begins.
        """
        start, size = self._region.start, blocks(max(nbytes, 1))
        self._give_back_what_was_read()
        offset = self._space.take(size, PAGE, range(start + room.start, min(start + room.stop, self._region.stop)))
        return None if offset is None else self._buffer(offset, nbytes, size)

    def lease_again(self, buffer: Buffer) -> Buffer | None:
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
        """Have a region of at least so many bytes, if the arena has that much in one piece; whatever is leased in it
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
        """From now on, register what is leased with a device."""
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


def aligned_empty(nbytes: int) -> torch.Tensor:
    """Ordinary memory for direct I/O that the caller owns: uint8, 4096-aligned, the length rounded up to 4096.

    From 2 MiB on it is a mapping of its own, in huge pages where the system grants them: `mapped_empty`.
    """
    size = blocks(nbytes)
    if size >= HUGE_PAGE:
        return mapped_empty(size)
    whole = torch.empty(size + PAGE, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % PAGE
    # The first byte of a storage of its own, because views may be made by their offset in the storage (`as_strided`).
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(whole.untyped_storage()[start : start + size])


def octets(memory: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which the caller keeps alive."""
    array = (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())
    return memoryview(array).cast("B")
