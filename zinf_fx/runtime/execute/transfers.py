"""Tiles on their way to the device: nc-, cg- and gg-transfer (ZeRO-Infinity, section 6.2), shared by all graphs."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable

import torch

from zinf_fx.errors import RanksError, StoreError
from zinf_fx.interrupts import finalizing, sealed
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.sharding import Segment
from zinf_fx.runtime.execute.packs import PackedTile, ShardedPack
from zinf_fx.runtime.memory.leases import Buffer, Ticket
from zinf_fx.runtime.ranks import Collective
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.pack import Pack, Stored, key_of
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window


class StagedTile:
    """One tile on its way to the device, or there, for as long as somebody holds it.

    It doesn't keep the storage alive: compiled code, for which tiles are fetched in advance, may outlive its model.
    """

    def __init__(self, storage: TensorStorage, planned: Tile, offset: int | None = None) -> None:
        """`offset`: where in the host arena's region its bytes are planned."""
        self.key = key_of(storage, planned)
        self.holds = 0
        self._nbytes = planned.nbytes
        self._counters = storage.tiers.counters
        self._refresh = storage.begin_refresh()
        if self._refresh is not None and not storage.in_place:
            self._refresh.wait()  # what is uploaded from host memory has to be there
        self._window = storage.settled().device_window(planned.start, planned.numel, offset=offset).read_only()

    def upload(self, offset: int | None = None) -> None:
        """Start to copy it to the device, to `offset` in the region that is planned there."""
        self._window.upload(offset)

    def allgather(self, name: str) -> None:
        """This rank has the whole tile."""

    @property
    def version(self) -> int | None:
        """Of the storage's bytes, that which the tile has."""
        return self._window.version

    def follow(self, storage: TensorStorage) -> None:
        """From now on, take over what is written to the storage."""
        self._window.follow(storage.bytes)

    def wait(self) -> torch.Tensor:
        """The tile's elements, flat; counts the time for which compute had to wait."""
        started = time.perf_counter()
        if self._refresh is not None:
            self._refresh.wait()
        value = self._window.wait()
        self._counters.stall_seconds += RECORDER.waited(started)
        self._counters.gathered_bytes += self._nbytes
        return value

    def close(self) -> None:
        """Give the buffers back."""
        self._window.close()


class ShardedTile:
    """A tile of which this rank has a shard, on its way to the device: fetched, uploaded, then all-gathered.

    As `StagedTile`. Where the device computes in host memory, the shard is read to its place in the whole.
    """

    def __init__(self, storage: TensorStorage, planned: Tile, offset: int | None = None) -> None:
        start, count = planned.start, planned.numel
        self.key = key_of(storage, planned)
        self.holds = 0
        self.version: int | None = storage.version
        self._count, self._device = count, storage.device
        self._ranks, self._counters = storage.share.ranks, storage.tiers.counters
        self._segments = storage.share.shards.within(start, count)
        self._padded = sum(one.padded for one in self._segments)
        self._name = storage.name
        self._nbytes = count * storage.dtype.itemsize
        self._full: torch.Tensor | None = None
        self._buffer: Buffer | None = None
        self._window: Window | DeviceWindow | None = None
        self._tickets: list[Ticket] = []
        self._gathering: list[Collective] = []
        parts = [one.held_by(self._ranks.shard) for one in self._segments]
        held, shard = parts[0].start, sum(map(len, parts))
        if storage.device.in_host_memory:
            self._buffer = storage.tiers.lease(self._padded * storage.dtype.itemsize, offset)
            self._full = self._buffer.tensor((self._padded,), storage.dtype)
            if storage.bytes.in_host_memory:
                self._window = storage.settled().window(held, shard).read_only()
            elif count:
                slots = [(self._slot(one), part) for one, part in zip(self._segments, parts, strict=True) if part]
                self._tickets = [storage.settled().read(part.start, slot, self._buffer) for slot, part in slots]
        else:
            self._window = storage.settled().device_window(held, shard, offset=offset).read_only()
            self._dtype = storage.dtype

    def _slot(self, segment: Segment) -> torch.Tensor:
        """The place of this rank's part of a segment in the whole."""
        rank = self._ranks.shard
        first = segment.start - self._segments[0].start + (rank * segment.shard if segment.owner is None else 0)
        return self._full[first : first + len(segment.held_by(rank))]

    def upload(self, offset: int | None) -> None:
        """Start to copy the shard to the device. The place at `offset` is for the whole, and not used yet."""
        if self._window is not None:
            self._window.upload(None)

    def follow(self, storage: TensorStorage) -> None:
        """A tile that stays is of no use once its parameter is written: other ranks write the other shards."""

    def allgather(self, name: str) -> None:
        """Start to gather all shards, once this rank's is here. `name`: for errors."""
        if self._gathering:
            return
        if self._full is None:
            with torch.inference_mode(False):
                self._full = torch.empty(self._padded, dtype=self._dtype, device=self._device.torch_device)
        if self._window is not None:
            self._window.upload()
            with self._device.beside_compute():
                shard = self._window.wait()
                self._gathering = self._ranks.all_gather_segments(self._full, shard, self._segments, name)
            return
        for ticket in self._tickets:
            ticket.wait()
        for one in self._segments:
            first = one.start - self._segments[0].start
            full = self._full[first : first + one.padded]
            self._gathering.append(self._ranks.all_gather(full, self._slot(one), name, one.owner))

    def wait(self) -> torch.Tensor:
        """The tile's elements, flat; counts the time for which compute had to wait."""
        started = time.perf_counter()
        self.allgather(self._name)
        for collective in self._gathering:
            collective.wait()
        self._counters.stall_seconds += RECORDER.waited(started)
        self._counters.gathered_bytes += self._nbytes
        return self._full[: self._count]

    def close(self) -> None:
        """Give the buffers back, once nothing writes to them."""
        for ticket in self._tickets:
            with contextlib.suppress(StoreError):
                ticket.wait()
        for collective in self._gathering:
            with contextlib.suppress(RanksError):
                collective.wait()
        if any(collective.failed for collective in self._gathering):
            return  # what may still be written to is never used again
        if self._window is not None:
            self._window.close()
        self._full = None
        if self._buffer is not None:
            self._buffer.release()


FlyingTile = StagedTile | ShardedTile | PackedTile | ShardedPack
"""A tile in flight."""


def _kind_of(storage: Stored) -> type[FlyingTile]:
    """How tiles of this come."""
    if isinstance(storage, Pack):
        return ShardedPack if storage.partitioned else PackedTile
    return ShardedTile if storage.share.partitioned else StagedTile


class Staging:
    """Tiles in flight, shared by every graph execution: a tile that one still holds is not read again for the next."""

    def __init__(self) -> None:
        # By `key_of`.
        self._tiles: dict[tuple[int, int, int], FlyingTile] = {}
        self._staying: dict[tuple[int, int, int], FlyingTile] = {}  # held until their next fetch
        self._watched: weakref.WeakSet[Stored] = weakref.WeakSet()  # those that tiles have stayed of
        self._plan: weakref.ref[Plan] | None = None  # that tiles stay for
        self._keys: list[int | None] = []  # of the storages of its tiles
        self._lock = threading.RLock()

    def fetch(self, storage: Stored, planned: Tile, offset: int | None) -> FlyingTile:
        """Hold a tile of `storage`, starting to read it unless it is held in its present version; to `offset` in the
        region of the host arena."""
        key = key_of(storage, planned)
        storage.settled()
        with self._lock, RECORDER.about(planned.label):
            tile = self._tiles.get(key)
            if tile is None or tile.version != storage.version:
                self._let_go(key)
                tile = self._tiles[key] = _kind_of(storage)(storage, planned, offset)
            tile.holds += 1
            self._let_go(key)
            return tile

    def upload(self, storage: Stored, planned: Tile, offset: int | None) -> None:
        """Start to copy a tile to the device, to `offset` in the region that is planned there, if it is held in its
        present version: `wait` copies any other."""
        with self._lock, RECORDER.about(planned.label):
            if (tile := self._present(storage, planned)) is not None:
                tile.upload(offset)

    def allgather(self, storage: Stored, planned: Tile) -> None:
        """Start to gather a tile's shards if it is held in its present version: `wait` gathers those of any other."""
        with self._lock, RECORDER.about(planned.label):
            if (tile := self._present(storage, planned)) is not None:
                tile.allgather(planned.label)

    def _present(self, storage: Stored, planned: Tile) -> FlyingTile | None:
        """The tile, if it is held in its present version."""
        tile = self._tiles.get(key_of(storage, planned))
        return tile if tile is not None and tile.version == storage.version else None

    def stay(self, tile: FlyingTile, storage: Stored) -> None:
        """Hand over a hold: the tile stays in memory until its next fetch, whatever is written to it meanwhile."""
        with self._lock:
            self._let_go(tile.key)
            self._staying[tile.key] = tile
            tile.follow(storage)
            if storage not in self._watched:
                self._watched.add(storage)
                weakref.finalize(storage, self._let_go_of, storage.key).atexit = False

    def stay_for(self, plan: Plan, storages: Iterable[Stored | None]) -> None:
        """A graph of `plan` begins, with tiles of `storages`. What stays in memory stays for plans by which the same
        tiles move alike, such as those of a prompt and of each token after it."""
        before = self._plan and self._plan()
        if plan is before:
            return
        keys = [None if storage is None else storage.key for storage in storages]
        # Tiles of one name may be of other storages in another plan, whose places in memory they would have.
        if before is None or keys != self._keys or not plan.moves_as(before):
            self.drop_staying()
        self._plan, self._keys = weakref.ref(plan), keys

    @sealed
    def drop_staying(self) -> None:
        """Let go of everything that stays."""
        for key in list(self._staying):
            self._let_go(key)

    def forget(self) -> None:
        """In a process made by fork: the tiles are its parent's, and nobody in it would release the lock."""
        self._lock = threading.RLock()
        self._tiles.clear()
        self._staying.clear()
        self._plan = None

    @finalizing
    def _let_go_of(self, storage_key: int) -> None:
        for key in [key for key in self._staying if key[0] == storage_key]:
            self._let_go(key)

    def _let_go(self, key: tuple[int, int, int]) -> None:
        if (tile := self._staying.pop(key, None)) is not None:
            self.release(tile)

    @sealed
    def release(self, tile: FlyingTile) -> None:
        """Drop one hold; the last one frees the tile's buffers."""
        with self._lock:
            tile.holds -= 1
            assert tile.holds >= 0, "a tile was released more often than fetched"
            if tile.holds:
                return
            if self._tiles.get(tile.key) is tile:
                del self._tiles[tile.key]
            tile.close()
