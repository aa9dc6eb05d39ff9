"""Tiles on their way to the device: nc-, cg- and gg-transfer (ZeRO-Infinity, section 6.2), shared by all graphs."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from zinf_fx.interrupts import finalizing, sealed
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.sharding import Segment
from zinf_fx.runtime.execute.flying import FlyingTile, GatheredTile, tile_key
from zinf_fx.runtime.execute.packs import PackedTile, ShardedPack
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.pack import Pack, Stored
from zinf_fx.runtime.tensor.storage import TensorStorage


class StagedTile(FlyingTile[TensorStorage]):
    """A tile that this rank has all of."""

    def _fetch(self, storage: TensorStorage, offset: int | None) -> None:
        self._refresh = storage.begin_refresh()
        if self._refresh is not None and not storage.in_place:
            self._refresh.wait()  # what is uploaded from host memory has to be there
        planned = self._planned
        self._window = storage.settled().device_window(planned.start, planned.numel, offset=offset).read_only()
        self._windows.append(self._window)

    def upload(self, offset: int | None = None) -> None:
        self._window.upload(offset)

    @property
    def version(self) -> int | None:
        return self._window.version

    def follow(self, storage: TensorStorage) -> None:
        self._window.follow(storage.bytes)

    def _values(self) -> torch.Tensor:
        if self._refresh is not None:
            self._refresh.wait()
        return self._window.wait()


class ShardedTile(GatheredTile[TensorStorage]):
    """A parameter, or some rows of one, of which this rank has a shard."""

    def _fetch(self, storage: TensorStorage, offset: int | None) -> None:
        self._ranks = storage.share.ranks
        self._segments = storage.share.shards.within(self._planned.start, self._planned.numel)
        parts = [one.held_by(self._ranks.shard) for one in self._segments]
        self._allocate(storage, self._count, offset)
        if self._whole is None or storage.bytes.in_host_memory:
            held, shard = parts[0].start, sum(map(len, parts))
            self._windows.append(storage.settled().device_window(held, shard, offset=offset).read_only())
        elif self._planned.numel:
            for one, part in zip(self._segments, parts, strict=True):
                if part:
                    self._reads.append(storage.settled().read(part.start, self._slot(one), self._buffer))

    @property
    def _count(self) -> int:
        return sum(one.padded for one in self._segments)

    def _slot(self, segment: Segment) -> torch.Tensor:
        """The place of this rank's part of a segment in the whole."""
        rank = self._ranks.shard
        first = segment.start - self._segments[0].start + (rank * segment.shard if segment.owner is None else 0)
        return self._memory[first : first + len(segment.held_by(rank))]

    def _gather(self, shards: list[torch.Tensor], name: str) -> None:
        rank = self._ranks.shard
        for one in self._segments:
            first, held = one.start - self._segments[0].start, one.held_by(rank)
            begin = held.start - self._segments[0].held_by(rank).start
            mine = shards[0][begin : begin + len(held)] if shards else self._slot(one)
            full = self._memory[first : first + one.padded]
            # At once: the next one may fail, and this one writes.
            self._collectives.append(self._ranks.all_gather(full, mine, name, one.owner))

    def _separated(self) -> torch.Tensor:
        return self._memory[: self._planned.numel]


def _kind_of(storage: Stored) -> type[FlyingTile]:
    """How tiles of this come."""
    if isinstance(storage, Pack):
        return ShardedPack if storage.partitioned else PackedTile
    return ShardedTile if storage.share.partitioned else StagedTile


class Staging:
    """Tiles in flight, shared by every graph execution: a tile that one still holds is not read again for the next."""

    def __init__(self) -> None:
        # By `tile_key`.
        self._tiles: dict[tuple[int, int, int], FlyingTile] = {}
        self._staying: dict[tuple[int, int, int], FlyingTile] = {}  # held until their next fetch
        self._watched: weakref.WeakSet[Stored] = weakref.WeakSet()  # those that tiles have stayed of
        self._plan: weakref.ref[Plan] | None = None  # that tiles stay for
        self._keys: list[int | None] = []  # of the storages of its tiles
        self._left: deque[FlyingTile] = deque()  # by finalizers, while somebody had the lock
        self._lock = threading.Lock()  # and no RLock: a finalizer runs in a thread that has it, too

    def fetch(self, storage: Stored, planned: Tile, offset: int | None) -> FlyingTile:
        """Hold a tile of `storage`, starting to read it unless it is held in its present version; to `offset` in the
        region of the host arena."""
        key = tile_key(storage, planned)
        storage.settled()
        with self._locked(), RECORDER.about(planned.label):
            tile = self._tiles.get(key)
            if tile is None or tile.version != storage.version:
                self._let_go(key)
                self._drop_left()  # whose memory the new one may need
                tile = self._tiles[key] = _kind_of(storage)(storage, planned, offset)
            tile.holds += 1
            self._let_go(key)
            return tile

    def upload(self, storage: Stored, planned: Tile, offset: int | None) -> None:
        """Start to copy a tile to the device, to `offset` in the region that is planned there, if it is held in its
        present version: `wait` copies any other."""
        with self._locked(), RECORDER.about(planned.label):
            if (tile := self.present(storage, planned)) is not None:
                tile.upload(offset)

    def allgather(self, storage: Stored, planned: Tile) -> None:
        """Start to gather a tile's shards if it is held in its present version: `wait` gathers those of any other."""
        with self._locked(), RECORDER.about(planned.label):
            if (tile := self.present(storage, planned)) is not None:
                tile.allgather(planned.label)

    def present(self, storage: Stored, planned: Tile) -> FlyingTile | None:
        """The tile, if it is held in its present version."""
        tile = self._tiles.get(tile_key(storage, planned))
        return tile if tile is not None and tile.version == storage.version else None

    def stay(self, tile: FlyingTile, storage: Stored) -> None:
        """Hand over a hold: the tile stays in memory until its next fetch, whatever is written to it meanwhile."""
        with self._locked():
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

    def drop_staying(self) -> None:
        """Let go of everything that stays."""
        with self._locked():
            for key in list(self._staying):
                self._let_go(key)

    def forget(self) -> None:
        """In a process made by fork: the tiles are its parent's, and nobody in it would release the lock."""
        self._lock = threading.Lock()
        self._tiles.clear()
        self._staying.clear()
        self._left.clear()
        self._plan = None

    @finalizing
    def _let_go_of(self, storage_key: int) -> None:
        gone = [key for key in list(self._staying) if key[0] == storage_key]
        self.leave([tile for key in gone if (tile := self._staying.pop(key, None)) is not None])

    def _let_go(self, key: tuple[int, int, int]) -> None:
        if (tile := self._staying.pop(key, None)) is not None:
            self._drop(tile)

    def release(self, tile: FlyingTile) -> None:
        """Drop one hold; the last one frees the tile's buffers."""
        with self._locked():
            self._drop(tile)

    def release_all(self, tiles: list[FlyingTile]) -> None:
        """Drop a hold of each, and where one fails, of the others all the same. The list is empty then."""
        with ExitStack() as releases:
            while tiles:
                releases.callback(self.release, tiles.pop())

    @finalizing
    def leave(self, tiles: list[FlyingTile]) -> None:
        """Drop a hold of each, in a finalizer, which may run in a thread that has the lock and is about to hold one of
        them, or in one that whoever has it waits for, such as the optimizer's. These drop them in the end."""
        while tiles:
            self._left.append(tiles.pop())
        self._drop_left_unless_locked()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Have the lock, and drop what finalizers leave meanwhile."""
        try:
            with self._lock:
                yield
        finally:
            self._drop_left_unless_locked()

    def _drop_left_unless_locked(self) -> None:
        while self._left and self._lock.acquire(blocking=False):  # another finalizer may have come meanwhile
            try:
                self._drop_left()
            finally:
                self._lock.release()

    def _drop_left(self) -> None:
        while self._left:
            self._drop(self._left.popleft())

    @sealed
    def _drop(self, tile: FlyingTile) -> None:
        tile.holds -= 1
        assert tile.holds >= 0, "a tile was released more often than fetched"
        if tile.holds:
            return
        if self._tiles.get(tile.key) is tile:
            del self._tiles[tile.key]
        tile.close()
