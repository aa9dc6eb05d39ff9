"""Tiles in flight where something fails, or ends in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from zinf_fx.errors import RanksError
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.execute.executor import EXECUTOR, Run
from zinf_fx.runtime.execute.tile_cache import TileCache
from zinf_fx.runtime.execute.tiles import FORSAKEN, GatheredTile
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.memory.transfers import Counters
from zinf_fx.runtime.ranks import ALONE

PLANNED = Tile("w", (4,), torch.float32, "nvme", None)


class Alone(GatheredTile):
    """One whose collectives can't begin while it is `alone`."""

    alone = True
    _count = 4

    def _fetch(self, storage: object, offset: int | None) -> None:
        pass

    def _gather(self, shards: list[torch.Tensor], name: str) -> None:
        if self.alone:
            raise RanksError(f"{name} is alone")
        self._whole.fill_(1.0)

    def _separated(self) -> torch.Tensor:
        return self._whole


def test_memory_that_nothing_was_gathered_to_is_no_value() -> None:
    """Of several that hold a tile, each finds out that its collectives don't begin."""
    storage = SimpleNamespace(key=1, version=0, device=CPU, ranks=ALONE, tiers=SimpleNamespace(counters=Counters()))
    tile = Alone(storage, PLANNED)
    for ask in (lambda: tile.allgather("w"), tile.wait, tile.wait):
        with pytest.raises(RanksError, match="w is alone"):
            ask()
    tile.alone = False
    assert tile.wait().tolist() == [1.0] * 4


class Begun:
    """A collective that has begun, and fails."""

    failed = False

    def wait(self) -> None:
        self.failed = True
        raise RanksError("a rank is gone")


class Halfway(Alone):
    """One of whose collectives the first has begun."""

    def _gather(self, shards: list[torch.Tensor], name: str) -> None:
        self._collectives.append(Begun())
        super()._gather(shards, name)


def test_a_tile_is_left_to_a_collective_that_failed_where_the_next_one_could_not_begin() -> None:
    storage = SimpleNamespace(key=1, version=0, device=CPU, ranks=ALONE, tiers=SimpleNamespace(counters=Counters()))
    tile = Halfway(storage, PLANNED)
    with pytest.raises(RanksError, match="w is alone"):
        tile.wait()
    tile.close()
    assert tile.state is FORSAKEN


class Storage:
    """Has nothing but a key."""

    key = 1


class InFlight:
    """A tile that somebody holds."""

    version = 0

    def __init__(self) -> None:
        self.key, self.references, self.closed = (Storage.key, 0, 4), 1, False

    def follow(self, storage: Storage) -> None:
        pass

    def upload(self, offset: int | None) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True


def test_a_storage_may_go_in_a_thread_that_whoever_has_the_lock_waits_for() -> None:
    """It may in that of the optimizer, where the garbage collector runs, while a fetch waits for room."""
    cache, tile, other, storages = TileCache(), InFlight(), InFlight(), [Storage()]
    cache.stay(tile, storages[0])
    thread = threading.Thread(target=storages.clear, daemon=True)
    with cache._lock:
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive() and not tile.closed
    cache.release(other)
    assert tile.closed and other.closed


def test_what_a_storage_that_is_gone_left_in_memory_goes_at_once() -> None:
    cache, tile, storages = TileCache(), InFlight(), [Storage()]
    cache.stay(tile, storages[0])
    storages.clear()
    assert tile.closed


class Seen(InFlight):
    """Something else happens where the tile is looked at."""

    def __init__(self, event: Callable[[Seen], None]) -> None:
        super().__init__()
        self._event = event

    @property
    def version(self) -> int:
        self._event(self)
        return 0


def test_a_stage_may_go_while_its_tile_is_fetched() -> None:
    """It goes in the thread that fetches, where the garbage collector runs. Nobody else holds the tile."""
    cache, storage = TileCache(), SimpleNamespace(key=Storage.key, version=0, settled=lambda: None)
    tile, other = (Seen(lambda seen: cache.leave([seen])) for _ in range(2))
    cache._tiles[tile.key] = tile
    assert cache.fetch(storage, PLANNED, None) is tile and not tile.closed
    cache.release(tile)
    assert tile.closed
    cache._tiles[other.key] = other
    cache.upload(storage, PLANNED, None)
    assert other.closed


@pytest.mark.parametrize("version", [0, 1], ids=["present", "old"])
def test_what_another_thread_leaves_while_a_tile_is_fetched_goes_at_once(version: int) -> None:
    """It goes before a tile is read again, whose place in memory it may have."""

    def leave(_: Seen) -> None:
        thread = threading.Thread(target=cache.leave, args=([left],), daemon=True)
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive() and not left.closed

    def read() -> None:
        assert left.closed
        raise RanksError("so far")

    cache, left, tile = TileCache(), InFlight(), Seen(leave)
    cache._tiles[tile.key] = tile
    tiers = SimpleNamespace(counters=Counters())
    whole = {"settled": lambda: None, "begin_refresh": read, "tiers": tiers, "partitioned": False}
    storage = SimpleNamespace(key=Storage.key, version=version, **whole)
    with pytest.raises(RanksError, match="so far") if version else nullcontext():
        cache.fetch(storage, PLANNED, None)
    assert left.closed


class Broken(InFlight):
    def close(self) -> None:
        raise AssertionError("which is no state")


def test_where_one_tile_fails_all_others_are_given_back() -> None:
    """They are given back after an error of the user's, which is the one that is raised."""
    schedule = SimpleNamespace(tiles=(), kind="inference")
    run = Run(SimpleNamespace(schedule=schedule, slots=None, moved=(), is_followed=False), [], [])
    run._in_flight = {0: (first := InFlight()), 1: Broken(), 2: (last := InFlight())}
    storage, error = Storage(), RanksError("w is alone")
    EXECUTOR.tiles.stay(staying := InFlight(), storage)
    run.abort(error)
    assert first.closed and last.closed and staying.closed
    assert error.__notes__ == ["and then: which is no state"]
