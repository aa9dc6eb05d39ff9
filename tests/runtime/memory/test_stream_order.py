"""A place in the arena of a CUDA device is used again only when what read the tile before has done so, in the order
that streams and events give: whether copies run as early as they may, and compute as late, or the other way round."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runtime.streams import Cuda as Streams
from runtime.streams import Stream

from zinf_fx.config import Config
from zinf_fx.plan.schedule import MemoryRegions, Tile
from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.execute.tiles import WholeTile
from zinf_fx.runtime.memory.device import CPU, Cuda, device_of
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tile import StoredTile
from zinf_fx.runtime.tensor.tiers import Tiers

COUNT = 2048
NBYTES = COUNT * 4


@pytest.fixture(params=[True, False], ids=["copies early", "copies late"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    streams = Streams(eager_copies=request.param)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda memory, stream: None)  # memory here is of no device
    yield streams
    streams.synchronize()
    gc.collect()


class Tiles:
    """Holds tiles of a stored tensor, tile n full of n + 1, and a region for two of them on a device."""

    def __init__(self, cuda: Streams, store: Path, tier: str, count: int) -> None:
        self.cuda = cuda
        config = Config(store=store, placement="nvme", host_memory="4MiB")
        self.tiers = Tiers(config)
        self.device = Cuda(torch.device("cpu"), cuda)
        self.tiers.plan(MemoryRegions(device=2 * NBYTES), 0, [self.device])
        self.storage = TensorStorage(
            config,
            LocalShard(Shards.of(count * COUNT, 1, True)),
            Allocation(self.tiers, tier, [count * COUNT], torch.float32, self.device),
        )
        window = self.storage.settled().window(load=False)
        window.wait().copy_(torch.arange(1.0, count + 1).repeat_interleave(COUNT))
        window.store()
        self.storage.bytes.flush()
        self.seen: list[torch.Tensor] = []

    def fetch(self, number: int, offset: int) -> WholeTile:
        planned = Tile("w", (1, COUNT), torch.float32, self.storage.tier, None, rows=(number, number + 1))
        tile = WholeTile(StoredTile.of([self.storage], planned), planned)
        for window in tile._windows:
            window.arrived()  # so that its copy starts now
        tile.upload(offset)
        return tile

    def read(self, tile: WholeTile, stream: Stream | None = None) -> None:
        """Queue compute that looks at the whole tile."""
        stream = stream or self.cuda.current_stream()
        before, self.cuda._current = self.cuda._current, stream
        (value,) = tile.wait()
        result = torch.full((COUNT,), -1.0)
        with self.cuda.stream(stream):
            result.copy_(value.view(-1))
        self.cuda._current = before
        self.seen.append(result)

    def check(self) -> None:
        self.cuda.synchronize()
        assert [result.unique().tolist() for result in self.seen] == [[n + 1.0] for n in range(len(self.seen))]
        assert self.tiers.counters.displaced == 0 and self.tiers.device_arenas[self.device].in_use == 0


def test_the_cpu_computes_in_host_memory() -> None:
    assert device_of(torch.device("cpu")) is CPU and CPU.in_host_memory
    with pytest.raises(KeyError):
        device_of(torch.device("meta"))


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_tiles_take_turns_in_a_place(cuda: Streams, tmp_path: Path, tier: str) -> None:
    tiles = Tiles(cuda, tmp_path, tier, 6)
    for number in range(6):
        tile = tiles.fetch(number, 0)
        tiles.read(tile)
        tile.close()
    tiles.check()


def test_a_prefetched_tile_goes_where_the_one_before_the_last_was(cuda: Streams, tmp_path: Path) -> None:
    tiles = Tiles(cuda, tmp_path, "host", 8)
    held = [tiles.fetch(0, 0)]
    for number in range(8):
        if number < 7:
            held.append(tiles.fetch(number + 1, (number + 1) % 2 * NBYTES))
        tile = held.pop(0)
        tiles.read(tile)
        tile.close()
    tiles.check()


def test_what_is_dropped_before_it_came_does_not_come_later(cuda: Streams, tmp_path: Path) -> None:
    """A copy that nobody waited for is still under way when its place is given to another tile."""
    tiles = Tiles(cuda, tmp_path, "host", 3)
    for number in range(3):
        tiles.fetch(2 - number, 0).close()
        tile = tiles.fetch(number, 0)
        tiles.read(tile)
        tile.close()
    tiles.check()


def test_compute_moves_to_another_stream(cuda: Streams, tmp_path: Path) -> None:
    """The next tile's copy follows what the stream before has queued, and a reader that is neither of the two."""
    tiles = Tiles(cuda, tmp_path, "host", 6)
    streams = [cuda.current_stream(), cuda.Stream(), cuda.Stream()]
    for stream in streams:
        stream.eager = streams[0].eager
    for number in range(0, 6, 2):
        cuda._current = streams[number // 2]
        tile = tiles.fetch(number, 0)
        tiles.read(tile)
        tile.close()
        tile = tiles.fetch(number + 1, 0)
        tiles.read(tile, streams[(number // 2 + 2) % 3])
        tile.close()
    tiles.check()


def test_a_tile_outlives_the_stream_that_owned_the_arena(cuda: Streams, tmp_path: Path) -> None:
    """It is read where it was uploaded, while the arena's owner is another stream by now."""
    tiles = Tiles(cuda, tmp_path, "host", 3)
    first, second = cuda.current_stream(), cuda.Stream()
    second.eager = first.eager
    tile = tiles.fetch(0, 0)
    cuda._current = second
    other = tiles.fetch(1, NBYTES)
    tiles.read(tile, first)
    tile.close()
    tiles.read(other)
    other.close()
    last = tiles.fetch(2, 0)
    tiles.read(last)
    last.close()
    tiles.check()


def test_another_stream_that_reads_waits_for_the_copy(cuda: Streams, tmp_path: Path) -> None:
    tiles = Tiles(cuda, tmp_path, "host", 3)
    reader = cuda.Stream()
    for stream in cuda._streams:
        stream.eager = stream is reader
    for number in range(3):
        tile = tiles.fetch(number, 0)
        tiles.read(tile, reader)
        tile.close()
    tiles.check()


def test_what_gathers_waits_for_a_copy_that_compute_does_not_wait_for(cuda: Streams, tmp_path: Path) -> None:
    tiles = Tiles(cuda, tmp_path, "host", 3)
    compute = cuda.current_stream()
    for number in range(3):
        tile = tiles.fetch(number, 0)
        gathered, computed = torch.full((COUNT,), -1.0), torch.zeros(())
        with tiles.device.beside_compute():
            (value,) = tile.wait()
            gathered.copy_(value.view(-1))
        with cuda.stream(compute):
            computed.copy_(torch.ones(()))
        if compute.eager:  # and copies are late
            assert computed and not tile._windows[0]._copy.done()
        tiles.seen.append(gathered)
        compute.wait_event(tiles.device._gathers.record_event())  # as a collective is waited for
        tile.close()
    tiles.check()
