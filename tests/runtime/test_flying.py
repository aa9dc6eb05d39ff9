"""Tiles in flight where something fails, or ends in another thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from zinf_fx.errors import RanksError
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.execute.executor import EXECUTOR, Run
from zinf_fx.runtime.execute.flying import FORSAKEN, GatheredTile
from zinf_fx.runtime.execute.staging import Staging
from zinf_fx.runtime.memory.counters import Counters
from zinf_fx.runtime.memory.device import CPU


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
    storage = SimpleNamespace(key=1, version=0, device=CPU, tiers=SimpleNamespace(counters=Counters()))
    tile = Alone(storage, Tile("w", (4,), torch.float32, "nvme", None))
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
    storage = SimpleNamespace(key=1, version=0, device=CPU, tiers=SimpleNamespace(counters=Counters()))
    tile = Halfway(storage, Tile("w", (4,), torch.float32, "nvme", None))
    with pytest.raises(RanksError, match="w is alone"):
        tile.wait()
    tile.close()
    assert tile.state is FORSAKEN


class Storage:
    """Has nothing but a key."""

    key = 1


class Flying:
    """A tile that somebody holds."""

    def __init__(self) -> None:
        self.key, self.holds, self.closed = (Storage.key, 0, 4), 1, False

    def follow(self, storage: Storage) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_a_storage_may_go_in_a_thread_that_whoever_has_the_lock_waits_for() -> None:
    """As in that of the optimizer, where the garbage collector runs, while a fetch waits for room."""
    staging, tile, other, storages = Staging(), Flying(), Flying(), [Storage()]
    staging.stay(tile, storages[0])
    thread = threading.Thread(target=storages.clear, daemon=True)
    with staging._lock:
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive() and not tile.closed
    staging.release(other)
    assert tile.closed and other.closed


def test_what_a_storage_that_is_gone_left_in_memory_goes_at_once() -> None:
    staging, tile, storages = Staging(), Flying(), [Storage()]
    staging.stay(tile, storages[0])
    storages.clear()
    assert tile.closed


class Broken(Flying):
    def close(self) -> None:
        raise AssertionError("which is no state")


def test_where_one_tile_fails_all_others_are_given_back() -> None:
    """After an error of the user's, which is the one that is raised."""
    run = Run(SimpleNamespace(schedule=SimpleNamespace(tiles=(), kind="inference"), slots=None), [])
    run._flying = {0: (first := Flying()), 1: Broken(), 2: (last := Flying())}
    storage, error = Storage(), RanksError("w is alone")
    EXECUTOR.staging.stay(staying := Flying(), storage)
    run.abort(error)
    assert first.closed and last.closed and staying.closed
    assert error.__notes__ == ["and then: which is no state"]
