"""What can be done with a window depends on its state, and what can't says so."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
import torch
from injecting import Fault, clear_faults, inject

from zinf_fx.config import Config
from zinf_fx.errors import StoreError
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.execute.tiles import TileState, WholeTile
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.tensor.allocation import Allocation, Follower
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tile import StoredTile
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.runtime.tensor.windows import WindowState

COUNT = 8192


@pytest.fixture
def storage(tmp_path: Path) -> TensorStorage:
    """Return a storage in the store, full of zeros."""
    config = Config(store=tmp_path, placement="nvme", host_memory="4MiB")
    stored = TensorStorage(
        config, LocalShard(Shards.of(COUNT, 1, True)), Allocation(Tiers(config), "nvme", [COUNT], torch.float32, CPU)
    )
    stored.set(torch.zeros(COUNT))
    stored.tiers.drain()
    return stored


def test_a_window_is_read_used_and_stored(storage: TensorStorage) -> None:
    window = storage.settled().window()
    assert window.state is WindowState.READING
    window.wait().fill_(1.0)
    assert window.state is WindowState.OPEN and window.ready and not window.is_over
    window.store()
    assert window.state is WindowState.STORED and window.is_over
    window.close()  # as in a `finally`: nothing is left to give back
    assert window.state is WindowState.STORED
    assert torch.equal(storage.value(), torch.ones(COUNT))


@pytest.mark.parametrize("end", ["store", "close"])
def test_a_window_that_is_over_says_so(storage: TensorStorage, end: str) -> None:
    window = storage.settled().window()
    getattr(window, end)()
    with pytest.raises(AssertionError, match="a window was used that is " + ("stored" if end == "store" else "closed")):
        window.wait()
    with pytest.raises(AssertionError, match="a window was used that is"):
        window.store()


def test_what_others_could_not_be_given_is_not_stored_and_comes_back(storage: TensorStorage) -> None:
    inject(storage.tiers.store, Fault("completion", operation="read", errno=errno.EINVAL))
    follower = storage.settled().window().read_only()
    follower.follow(storage.bytes)
    while not follower.ready:
        time.sleep(0.001)
    clear_faults(storage.tiers.store)
    held = storage.tiers.host.in_use
    window = storage.settled().window(load=False)
    window.wait().fill_(1.0)
    with pytest.raises(StoreError):
        window.store()
    assert window.state is WindowState.OPEN
    window.close()
    assert storage.tiers.host.in_use == held
    follower.close()


def test_a_follower_may_be_closed_when_a_write_has_found_it(
    storage: TensorStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread closes it, while the optimizer writes in another one: the memory is somebody else's then."""
    follower = storage.settled().window().read_only()
    follower.follow(storage.bytes)
    memory, find = follower.wait(), storage.bytes.allocation.present_followers

    def find_and_close() -> list[Follower]:
        followers = find()
        assert followers == [follower]
        follower.close()
        return followers

    monkeypatch.setattr(storage.bytes.allocation, "present_followers", find_and_close)
    window = storage.settled().window(load=False)
    window.wait().fill_(1.0)
    window.store()
    assert torch.equal(memory, torch.zeros(COUNT)) and torch.equal(storage.value(), torch.ones(COUNT))


def test_a_tile_is_freed_once(storage: TensorStorage) -> None:
    planned = Tile("w", (COUNT,), torch.float32, "nvme", None)
    tile = WholeTile(StoredTile.of([storage], planned), planned)
    assert tile.state is TileState.FETCHED
    assert torch.equal(*tile.wait(), torch.zeros(COUNT))
    tile.close()
    assert tile.state is TileState.FREED and storage.tiers.host.in_use == 0
    with pytest.raises(AssertionError, match="a tile that is freed can't be freed"):
        tile.close()
