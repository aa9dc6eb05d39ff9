"""Tiles on their way to the device: nc-, cg- and gg-transfer (ZeRO-Infinity, section 6.2), shared by all graphs."""

from __future__ import annotations

import threading
import time

import torch

from zinf_fx.runtime.storage import TensorStorage


class StagedTile:
    """One tile on its way to the device, or there, for as long as somebody holds it.

    It doesn't keep the storage alive: compiled code, for which tiles are fetched in advance, may outlive its model.
    """

    def __init__(self, storage: TensorStorage, start: int, count: int) -> None:
        self.key = (storage.key, start, count)
        self.version = storage.version
        self.holds = 0
        self._nbytes = count * storage.dtype.itemsize
        self._counters = storage.tiers.counters
        self._window = storage.window(start, count).read_only()

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
        self._lock = threading.RLock()

    def fetch(self, storage: TensorStorage, start: int, count: int) -> StagedTile:
        """Hold `count` elements of `storage`, starting to read them unless they are held in their present version."""
        key = (storage.key, start, count)
        with self._lock:
            tile = self._tiles.get(key)
            if tile is None or tile.version != storage.version:
                tile = self._tiles[key] = StagedTile(storage, start, count)
            tile.holds += 1
            return tile

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
