"""The tiles in flight, shared by all graphs, and those that stay in memory between uses."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from zinf_fx.interrupts import finalizing, sealed
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.execute.tiles import GatheredTile, InFlightTile, WholeTile, tile_key
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.stored_tile import StoredTile


class TileCache:
    """Tiles in flight, shared by every graph execution: a tile that one still holds is not read again for the next."""

    def __init__(self) -> None:
        # By `tile_key`.
        self._tiles: dict[tuple[int, int, int], InFlightTile] = {}
        self._staying: dict[tuple[int, int, int], InFlightTile] = {}  # held until their next fetch
        self._watched: weakref.WeakSet[StoredTile] = weakref.WeakSet()  # those that tiles have stayed of
        self._plan: weakref.ref[Plan] | None = None  # that tiles stay for
        self._keys: list[int | None] = []  # of the tiles of its tiles
        self._left: deque[InFlightTile] = deque()  # by finalizers, while somebody had the lock
        self._lock = threading.Lock()  # and no RLock: a finalizer runs in a thread that has it, too

    def fetch(self, stored: StoredTile, planned: Tile, offset: int | None) -> InFlightTile:
        """Hold a tile of `stored`, starting to read it unless it is held in its present version; to `offset` in the
        region of the host arena."""
        key = tile_key(stored, planned)
        stored.settled()
        with self._locked(), RECORDER.about(planned.label):
            tile = self._tiles.get(key)
            if tile is None or tile.version != stored.version:
                self._let_go(key)
                self._drop_left()  # whose memory the new one may need
                kind = GatheredTile if stored.partitioned else WholeTile
                tile = self._tiles[key] = kind(stored, planned, offset)
            tile.references += 1
            self._let_go(key)
            return tile

    def upload(self, stored: StoredTile, planned: Tile, offset: int | None) -> None:
        """Start to copy a tile to the device, to `offset` in the region that is planned there, if it is held in its
        present version: `wait` copies any other."""
        with self._locked(), RECORDER.about(planned.label):
            if (tile := self.present(stored, planned)) is not None:
                tile.upload(offset)

    def allgather(self, stored: StoredTile, planned: Tile) -> None:
        """Start to gather a tile's shards if it is held in its present version: `wait` gathers those of any other."""
        with self._locked(), RECORDER.about(planned.label):
            if (tile := self.present(stored, planned)) is not None:
                tile.allgather(planned.label)

    def present(self, stored: StoredTile, planned: Tile) -> InFlightTile | None:
        """The tile, if it is held in its present version."""
        tile = self._tiles.get(tile_key(stored, planned))
        return tile if tile is not None and tile.version == stored.version else None

    def stay(self, tile: InFlightTile, stored: StoredTile) -> None:
        """Hand over a hold: the tile stays in memory until its next fetch, whatever is written to it meanwhile."""
        with self._locked():
            self._let_go(tile.key)
            self._staying[tile.key] = tile
            tile.follow(stored)
            if stored not in self._watched:
                self._watched.add(stored)
                weakref.finalize(stored, self._let_go_of, stored.key).atexit = False

    def stay_for(self, plan: Plan, tiles: Iterable[StoredTile | None]) -> None:
        """A graph of `plan` begins, with these tiles. What stays in memory stays for plans by which the same
        tiles move alike, such as those of a prompt and of each token after it."""
        before = self._plan and self._plan()
        if plan is before:
            return
        keys = [None if stored is None else stored.key for stored in tiles]
        # Tiles of one name may be of other tiles in another plan, whose places in memory they would have.
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

    def release(self, tile: InFlightTile) -> None:
        """Drop one hold; the last one frees the tile's buffers."""
        with self._locked():
            self._drop(tile)

    def release_all(self, tiles: list[InFlightTile]) -> None:
        """Drop a hold of each, and where one fails, of the others all the same. The list is empty then."""
        with ExitStack() as releases:
            while tiles:
                releases.callback(self.release, tiles.pop())

    @finalizing
    def leave(self, tiles: list[InFlightTile]) -> None:
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
    def _drop(self, tile: InFlightTile) -> None:
        tile.references -= 1
        assert tile.references >= 0, "a tile was released more often than fetched"
        if tile.references:
            return
        if self._tiles.get(tile.key) is tile:
            del self._tiles[tile.key]
        tile.close()
