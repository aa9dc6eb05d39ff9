"""The arena of a device with memory of its own: where the buffers of uploads lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zinf_fx.errors import StoreError
from zinf_fx.runtime.memory.counters import Counters
from zinf_fx.runtime.memory.device import Device
from zinf_fx.runtime.memory.freelist import Space
from zinf_fx.runtime.memory.leases import Buffer, Lessor
from zinf_fx.sizes import PAGE, blocks

_NO_LIMIT = 1 << 60


class DeviceArena(Lessor):
    """One region of a device's memory, taken from PyTorch's allocator once, and leased at the places that are planned.

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

    def lease(self, offset: int, nbytes: int) -> Buffer:
        """A buffer of at least `nbytes` bytes at `offset`, or elsewhere."""
        size = blocks(max(nbytes, 1))
        start = self._space.take(size, PAGE, range(offset, offset + size))
        if start is not None:
            self._counters.placed += 1
            self._device.take_over(self._memory)
            return Buffer(self, self._memory, start, self._memory.data_ptr() + start, nbytes, size)
        self._counters.displaced += 1
        memory = _allocate(size, self._device.torch_device)
        return Buffer(self, memory, self._elsewhere.take(size, PAGE), memory.data_ptr(), nbytes, size)

    @property
    def in_use(self) -> int:
        """Bytes leased, elsewhere too."""
        return super().in_use + self._elsewhere.in_use

    @property
    def touched(self) -> int:
        """Bytes of the region that were leased at any time since the last `restart_peak`, and the most that lay
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
            return torch.empty(0, dtype=dtype, device=memory.device).set_(storage, 0, shape)

    def _give_back(self, offset: int, size: int) -> None:
        (self._space if offset < self.capacity else self._elsewhere).give(offset, size)


def _allocate(nbytes: int, torch_device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it may be written in another mode
        return torch.empty(nbytes, dtype=torch.uint8, device=torch_device)
