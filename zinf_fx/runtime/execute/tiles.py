"""Tiles in flight: on their way to the device, or there, for as long as somebody holds them. These are the transfers of
ZeRO-Infinity, section 6.2: from NVMe to host memory, from there to the device, and all-gathers."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch

from zinf_fx.errors import RanksError, StoreError
from zinf_fx.plan.schedule import PackMember, Tile
from zinf_fx.runtime.lifecycle import Lifecycle
from zinf_fx.runtime.memory.arena import Buffer
from zinf_fx.runtime.memory.transfers import Ticket
from zinf_fx.runtime.ranks import Collective
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.stored_tile import StoredTile, TilePart
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window


class TileState(Enum):
    """How far a tile has come."""

    FETCHED = "fetched"  # the reads of what this rank has of it have begun, and as far as it was asked for, the copies
    GATHERED = "all-gathered"  # all collectives that bring what the others have of it have begun
    FREED = "freed"
    FORSAKEN = "left to a collective that failed"  # what may still be written to is never used again


FETCHED, GATHERED, FREED, FORSAKEN = TileState


class InFlightTile(Lifecycle, ABC):
    """A tile, in flight once it is made. It doesn't keep the storage alive: compiled code, for which tiles are fetched
    in advance, may outlive its model.

    Attributes:
        references: how many hold it.
        version: of the storage's bytes, that which the tile has; None: an unknown one.
    """

    what = "tile"
    following: ClassVar = {
        FETCHED: (GATHERED, FREED, FORSAKEN),  # of several collectives, some may have begun
        GATHERED: (FREED, FORSAKEN),
        FREED: (),
        FORSAKEN: (),
    }

    def __init__(self, stored: StoredTile, planned: Tile, offset: int | None = None) -> None:
        """Start to read it to `offset` in the region of the host arena that is planned."""
        self.state = FETCHED
        self.key = tile_key(stored, planned)
        self.references = 0
        self._planned, self._nbytes, self._counters = planned, planned.nbytes, stored.tiers.counters
        self._windows: list[Window | DeviceWindow] = []
        try:
            self._fetch(stored, offset)
        except BaseException:
            self.close()
            raise

    @property
    @abstractmethod
    def version(self) -> int | None: ...

    @abstractmethod
    def _fetch(self, stored: StoredTile, offset: int | None) -> None:
        """Start to read it."""

    @abstractmethod
    def upload(self, offset: int | None = None) -> None:
        """Start to copy it to the device, to `offset` in the region that is planned there."""

    def allgather(self, name: str) -> None:
        """Start to gather what the other ranks have of it. `name`: for errors."""

    @abstractmethod
    def follow(self, stored: StoredTile) -> None:
        """From now on, take over what is written to the storage."""

    def wait(self) -> list[torch.Tensor]:
        """What is computed with, of each of the tile's parameters; counts the time for which compute had to wait."""
        started = time.perf_counter()
        values = self._values()
        self._counters.stall_seconds += RECORDER.waited(started)
        self._counters.gathered_bytes += self._nbytes
        return values

    @abstractmethod
    def _values(self) -> list[torch.Tensor]:
        """The values of the parameters, for `wait`."""

    def close(self) -> None:
        """Give the buffers back."""
        self.become(FREED)
        for window in self._windows:
            window.close()


class WholeTile(InFlightTile):
    """A tile that this rank has all of: what lives side by side comes in one transfer."""

    def _fetch(self, stored: StoredTile, offset: int | None) -> None:
        self._refreshes = stored.begin_refresh()
        self._arena = stored.tiers.host
        parts = stored.parts
        if any(part.bytes.on_device is None for part in parts):
            for refresh in self._refreshes:
                refresh.wait()  # what is uploaded from host memory has to be there
        # Where the parts begin, in bytes, and what is in each: the parts themselves keep bytes alive.
        self._starts = [part.start * self._planned.dtype.itemsize for part in parts]
        self._members = [(list(part.members), part.cut) for part in parts]
        for part, start in zip(parts, self._starts, strict=True):
            self._windows.append(part.window(None if offset is None else offset + start))

    @property
    def version(self) -> int | None:
        versions = [version for window in self._windows if (version := window.version) is not None]
        return sum(versions) if len(versions) == len(self._windows) else None

    def upload(self, offset: int | None = None) -> None:
        for window, start in zip(self._windows, self._starts, strict=True):
            window.upload(None if offset is None else offset + start)

    def follow(self, stored: StoredTile) -> None:
        for part, window in zip(stored.parts, self._windows, strict=True):
            window.follow(part.bytes)

    def _values(self) -> list[torch.Tensor]:
        for refresh in self._refreshes:
            refresh.wait()
        values: dict[int, torch.Tensor] = {}
        for window, (numbers, cut) in zip(self._windows, self._members, strict=True):
            values.update(zip(numbers, cut.of(window.wait(), self._arena), strict=True))
        return [values[number] for number in range(len(values))]


class _Gather(NamedTuple):
    """One collective that gathers a tile, or some segments of it.

    Attributes:
        full: which elements of the tile's memory it fills.
        own: those that this rank has; none, if the `owner` of all is another one.
    """

    full: range
    own: range
    owner: int | None = None


class GatheredTile(InFlightTile):
    """A tile of which this rank has a shard: fetched, uploaded, then all-gathered.

    Where the device computes in host memory, what comes from NVMe is read to its place in the whole. A pack is gathered
    at once, and has room for what is copied behind the shards of all ranks: see [Note: packs over ranks]. Of a
    parameter, each segment is gathered by itself.
    """

    def __init__(self, stored: StoredTile, planned: Tile, offset: int | None = None) -> None:
        self._version = stored.version
        self._device, self._ranks = stored.device, stored.ranks
        self._whole: torch.Tensor | None = None  # memory for all shards; on a device, from GATHERED on
        self._buffer: Buffer | None = None  # of the host arena, that it is in
        self._reads: list[Ticket] = []  # to their places in it
        self._gathers: list[_Gather] = []
        # Of each window, which of its elements belong where in the whole.
        self._places: list[list[tuple[range, int]]] = []
        self._collectives: list[Collective] = []
        self._found: list[torch.Tensor] | None = None  # in the whole, once it was asked for
        super().__init__(stored, planned, offset)

    @property
    def version(self) -> int | None:
        return self._version

    def _fetch(self, stored: StoredTile, offset: int | None) -> None:
        planned, parts = self._planned, stored.parts
        places_of_parts = self._plan_pack(parts) if planned.members else [self._plan_segments(stored)]
        self._count = self._gathers[-1].full.stop + self._ranks.shards * sum(map(_copied, planned.members))
        if self._device.in_host_memory:
            self._buffer = stored.tiers.allocate(self._count * planned.dtype.itemsize, offset)
            self._whole = self._buffer.tensor((self._count,), planned.dtype)
        for part, places in zip(parts, places_of_parts, strict=True):
            if self._whole is None or part.bytes.in_host_memory:
                at = None if offset is None else offset + part.start * planned.dtype.itemsize
                self._windows.append(part.window(at))
                self._places.append(places)
                continue
            for elements, place in places:
                memory = self._whole[place : place + len(elements)]
                self._reads.append(part.bytes.read(part.elements[elements.start], memory, self._buffer))

    def _plan_pack(self, parts: Sequence[TilePart]) -> list[list[tuple[range, int]]]:
        """One collective, in which shards lie in a row. Returns where what of each part belongs in the whole."""
        *self._starts, shard = accumulate((member.shard for member in self._planned.members), initial=0)
        first = self._ranks.shard * shard
        self._gathers.append(_Gather(range(self._ranks.shards * shard), range(first, first + shard)))
        return [_joined((own, first + self._starts[n]) for n, own in part.members.items()) for part in parts]

    def _plan_segments(self, stored: StoredTile) -> list[tuple[range, int]]:
        """A collective for each segment. Returns where what of the only part belongs in the whole."""
        (parameter,), rank = stored.members, self._ranks.shard
        places, held = [], 0
        for segment in parameter.shard.shards.within(self._planned.start, self._planned.numel):
            first, mine = segment.start - self._planned.start, segment.gathered_from(rank)
            own = range(first + mine.start, first + mine.stop)
            self._gathers.append(_Gather(range(first, first + segment.padded), own, segment.owner))
            if own:
                places.append((range(held, held + len(own)), own.start))
            held += len(own)
        return places

    def upload(self, offset: int | None = None) -> None:
        """Start to copy the shard to the device. The place at `offset` is for the whole, and not used yet."""
        for window in self._windows:
            window.upload(None)

    def follow(self, stored: StoredTile) -> None:
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

    def _gather(self, shards: list[torch.Tensor], name: str) -> None:
        """Start the collectives. `shards`: what the windows are over."""
        assert self._whole is not None
        places = [
            (place, shard[elements.start : elements.stop])
            for shard, of_window in zip(shards, self._places, strict=True)
            for elements, place in of_window
        ]
        for full, own, owner in self._gathers:
            mine = self._whole[own.start : own.stop]
            brought = [(place, elements) for place, elements in places if place in own]
            if len(brought) == 1 and len(brought[0][1]) == len(own):
                mine = brought[0][1]
            else:
                for place, elements in brought:
                    self._whole[place : place + len(elements)].copy_(elements)
            # At once: the next one may fail, and this one writes.
            self._collectives.append(self._ranks.all_gather(self._whole[full.start : full.stop], mine, name, owner))

    def _values(self) -> list[torch.Tensor]:
        self.allgather(self._planned.label)
        for collective in self._collectives:
            collective.wait()
        if self._found is None:
            self._found = self._separated()
        return self._found

    def _separated(self) -> list[torch.Tensor]:
        """The parameters: those that the first rank has, where they are, the others copied."""
        planned = self._planned
        assert self._whole is not None
        if not planned.members:
            return [self._whole[: planned.numel].view(planned.shape)]
        end = self._gathers[0].full.stop
        shards, values = self._whole[:end].view(self._ranks.shards, -1), []
        for member, start in zip(planned.members, self._starts, strict=True):
            elements = shards[:, start : start + member.shard]
            if _copied(member):
                begin, end = end, end + elements.numel()
                elements = self._whole[begin:end].view(elements.shape).copy_(elements).view(-1)
            else:
                elements = elements[0]
            values.append(elements[: member.numel].view(member.shape))
        return values

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


def _copied(member: PackMember) -> int:
    """How many elements of each rank's shard are copied: of a parameter in a pack of which no rank has all elements."""
    return member.shard if member.numel > member.shard else 0


def _joined(places: Iterable[tuple[range, int]]) -> list[tuple[range, int]]:
    """Elements, and where they belong, in as few ranges as possible."""
    joined: list[tuple[range, int]] = []
    for own, start in places:
        if joined and joined[-1][0].stop == own.start and joined[-1][1] + len(joined[-1][0]) == start:
            joined[-1] = range(joined[-1][0].start, own.stop), joined[-1][1]
        else:
            joined.append((own, start))
    return joined


def tile_key(stored: StoredTile, planned: Tile) -> tuple[int, int, int]:
    """What tells a tile from all others: the storage, the first element, and how many there are."""
    return stored.key, planned.start, planned.numel
