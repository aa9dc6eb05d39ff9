"""What all tiles in flight have in common: on their way to the device, or there, for as long as somebody holds them."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar, Generic, TypeVar

import torch

from zinf_fx.errors import RanksError, StoreError
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.lifecycle import Lifecycle
from zinf_fx.runtime.memory.arena import Buffer
from zinf_fx.runtime.memory.transfers import Ticket
from zinf_fx.runtime.ranks import Collective
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.pack import Stored
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window

Values = torch.Tensor | list[torch.Tensor]
"""A tile's elements, flat; of a pack, its parameters."""


class TileState(Enum):
    """How far a tile has come."""

    FETCHED = "fetched"  # the reads of what this rank has of it have begun, and as far as it was asked for, the copies
    GATHERED = "all-gathered"  # all collectives that bring what the others have of it have begun
    FREED = "freed"
    FORSAKEN = "left to a collective that failed"  # what may still be written to is never used again


FETCHED, GATHERED, FREED, FORSAKEN = TileState


S = TypeVar("S", bound=Stored)


class FlyingTile(Lifecycle, ABC, Generic[S]):
    """A tile, in flight once it is made. It doesn't keep the storage alive: compiled code, for which tiles are fetched
    in advance, may outlive its model.

    Attributes:
        holds: how many hold it.
        version: of the storage's bytes, that which the tile has; None: an unknown one.
    """

    what = "tile"
    following: ClassVar = {
        FETCHED: (GATHERED, FREED, FORSAKEN),  # of several collectives, some may have begun
        GATHERED: (FREED, FORSAKEN),
        FREED: (),
        FORSAKEN: (),
    }

    def __init__(self, storage: S, planned: Tile, offset: int | None = None) -> None:
        """Start to read it to `offset` in the region of the host arena that is planned."""
        self.state = FETCHED
        self.key = tile_key(storage, planned)
        self.holds = 0
        self._planned, self._nbytes, self._counters = planned, planned.nbytes, storage.tiers.counters
        self._windows: list[Window | DeviceWindow] = []
        try:
            self._fetch(storage, offset)
        except BaseException:
            self.close()
            raise

    @property
    @abstractmethod
    def version(self) -> int | None: ...

    @abstractmethod
    def _fetch(self, storage: S, offset: int | None) -> None:
        """Start to read it."""

    @abstractmethod
    def upload(self, offset: int | None = None) -> None:
        """Start to copy it to the device, to `offset` in the region that is planned there."""

    def allgather(self, name: str) -> None:
        """Start to gather what the other ranks have of it. `name`: for errors."""

    @abstractmethod
    def follow(self, storage: S) -> None:
        """From now on, take over what is written to the storage."""

    def wait(self) -> Values:
        """What is computed with; counts the time for which compute had to wait."""
        started = time.perf_counter()
        values = self._values()
        self._counters.stall_seconds += RECORDER.waited(started)
        self._counters.gathered_bytes += self._nbytes
        return values

    @abstractmethod
    def _values(self) -> Values:
        """As `wait`."""

    def close(self) -> None:
        """Give the buffers back."""
        self.become(FREED)
        for window in self._windows:
            window.close()


class GatheredTile(FlyingTile[S]):
    """A tile of which this rank has a shard: fetched, uploaded, then all-gathered.

    Where the device computes in host memory, what comes from NVMe is read to its place in the whole.
    """

    def __init__(self, storage: S, planned: Tile, offset: int | None = None) -> None:
        self._version = storage.version
        self._device = storage.device
        self._whole: torch.Tensor | None = None  # memory for all shards; on a device, from GATHERED on
        self._buffer: Buffer | None = None  # of the host arena, that it is in
        self._reads: list[Ticket] = []  # to their places in it
        self._collectives: list[Collective] = []
        self._found: Values | None = None  # in the whole, once it was asked for
        super().__init__(storage, planned, offset)

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def _memory(self) -> torch.Tensor:
        """That for all shards, once it is there."""
        assert self._whole is not None
        return self._whole

    def _allocate(self, storage: S, count: int, offset: int | None) -> None:
        """Have memory for so many elements, if that is of the host arena."""
        if self._device.in_host_memory:
            self._buffer = storage.tiers.allocate(count * self._planned.dtype.itemsize, offset)
            self._whole = self._buffer.tensor((count,), self._planned.dtype)

    def upload(self, offset: int | None = None) -> None:
        """Start to copy the shard to the device. The place at `offset` is for the whole, and not used yet."""
        for window in self._windows:
            window.upload(None)

    def follow(self, storage: S) -> None:
        """A tile that stays is of no use once it is written: other ranks write the other shards."""

    def allgather(self, name: str) -> None:
        if self.state is GATHERED:
            return
        if self._whole is None:
            with torch.inference_mode(False):
                dtype, device = self._planned.dtype, self._device.torch_device
                self._whole = torch.empty(self._count, dtype=dtype, device=device)
        self.upload()
        with self._device.beside_compute():
            shards = [window.wait() for window in self._windows]
            for read in self._reads:
                read.wait()
            self._gather(shards, name)
            self.become(GATHERED)

    @property
    @abstractmethod
    def _count(self) -> int:
        """Elements of all memory."""

    @abstractmethod
    def _gather(self, shards: list[torch.Tensor], name: str) -> None:
        """Start the collectives. `shards`: what the windows are over."""

    def _values(self) -> Values:
        self.allgather(self._planned.label)
        for collective in self._collectives:
            collective.wait()
        if self._found is None:
            self._found = self._separated()
        return self._found

    @abstractmethod
    def _separated(self) -> Values:
        """As `wait`, of what has been gathered."""

    def close(self) -> None:
        """Give the buffers back, once nothing writes to them."""
        for read in self._reads:
            with contextlib.suppress(StoreError):
                read.wait()
        for collective in self._collectives:
            with contextlib.suppress(RanksError):
                collective.wait()
        if any(collective.failed for collective in self._collectives):
            self.become(FORSAKEN)
            return
        super().close()
        self._whole = self._found = None
        if self._buffer is not None:
            self._buffer.release()


def tile_key(storage: Stored, planned: Tile) -> tuple[int, int, int]:
    """What tells a tile from all others: the storage, the first element, and how many there are."""
    return storage.key, planned.start, planned.numel
