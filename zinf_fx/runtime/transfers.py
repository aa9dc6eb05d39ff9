"""Tiles on their way to the device: nc-, cg- and gg-transfer (ZeRO-Infinity, section 6.2), shared by all graphs."""

from __future__ import annotations

import threading
import time
import weakref

import torch

from zinf_fx.runtime.storage import TensorStorage


class StagedTile:
    """One tile on its way to the device, or there, for as long as somebody holds it.

    It doesn't keep the storage alive: compiled code, for which tiles are fetched in advance, may outlive its model.
    """

    def __init__(self, storage: TensorStorage, start: int, count: int, offset: int | None = None) -> None:
        """`offset`: where in the host arena's region its bytes are planned."""
        self.key = (storage.key, start, count)
        self.holds = 0
        self._nbytes = count * storage.dtype.itemsize
        self._counters = storage.tiers.counters
        self._window = storage.device_window(start, count, offset=offset).read_only()

    def upload(self, offset: int | None = None) -> None:
        """Start to copy it to the device, to `offset` in the region that is planned there."""
        self._window.upload(offset)

    @property
    def version(self) -> int | None:
        """Of the storage's bytes, that which the tile has."""
        return self._window.version

    def follow(self, storage: TensorStorage) -> None:
        """From now on, take over what is written to the storage."""
        self._window.follow(storage)

    def wait(self) -> torch.Tensor:
        """The tile's elements, flat; counts the time for which compute had to wait."""
        started = time.perf_counter()
        value = self._window.wait()
        self._counters.stall_seconds += time.perf_counter() - started
        self._counters.gathered_bytes += self._nbytes
        return value

    def close(self) -> None:
        """Give the buffers back."""
        self._window.close()


class Staging:
    """Tiles in flight, shared by every graph execution: a tile that one still holds is not read again for the next."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[int, int, int], StagedTile] = {}  # by the storage's key and the elements
        self._staying: dict[tuple[int, int, int], StagedTile] = {}  # held until their next fetch
        self._watched: weakref.WeakSet[TensorStorage] = weakref.WeakSet()  # those that tiles have stayed of
        self._lock = threading.RLock()

    def fetch(self, storage: TensorStorage, start: int, count: int, offset: int | None = None) -> StagedTile:
        """Hold `count` elements of `storage`, starting to read them unless they are held in their present version."""
        key = (storage.key, start, count)
        storage.settle()
        with self._lock:
            tile = self._tiles.get(key)
            if tile is None or tile.version != storage.version:
                self._let_go(key)
                tile = self._tiles[key] = StagedTile(storage, start, count, offset)
            tile.holds += 1
            self._let_go(key)
            return tile

    def upload(self, storage: TensorStorage, start: int, count: int, offset: int | None = None) -> None:
        """Start to copy a tile to the device, to `offset` in the region that is planned there, if it is held in its
        present version: `wait` copies any other."""
        with self._lock:
            tile = self._tiles.get((storage.key, start, count))
            if tile is not None and tile.version == storage.version:
                tile.upload(offset)

    def stay(self, tile: StagedTile, storage: TensorStorage) -> None:
        """Hand over a hold: the tile stays in memory until its next fetch, whatever is written to it meanwhile."""
        with self._lock:
            self._let_go(tile.key)
            self._staying[tile.key] = tile
            tile.follow(storage)
            if storage not in self._watched:
                self._watched.add(storage)
                weakref.finalize(storage, self._let_go_of, storage.key).atexit = False

    def drop_staying(self) -> None:
        """Let go of everything that stays."""
        for key in list(self._staying):
            self._let_go(key)

    def _let_go_of(self, storage_key: int) -> None:
        for key in [key for key in self._staying if key[0] == storage_key]:
            self._let_go(key)

    def _let_go(self, key: tuple[int, int, int]) -> None:
        if (tile := self._staying.pop(key, None)) is not None:
            self.release(tile)

    def release(self, tile: StagedTile) -> None:
        """Drop one hold; the last one frees the tile's buffers."""
        with self._lock:
            tile.holds -= 1
            assert tile.holds >= 0, "a tile was released more often than fetched"
            if tile.holds:
                return
            if self._tiles.get(tile.key) is tile:
                del self._tiles[tile.key]
            tile.close()
