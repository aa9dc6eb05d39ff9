"""Extents over several volumes: where their bytes lie, and what happens when a volume is full."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from injecting import Fault, inject

from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.native.engine import File, FileTicket
from zinf_fx.runtime.disk.store import Extent, Store
from zinf_fx.runtime.disk.stripes import UNIT, Place, Turns, runs
from zinf_fx.runtime.memory.host import aligned_empty

MIB = 1 << 20


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=8, unique=True),
    st.integers(1, 4),
    st.data(),
)
def test_runs_cover_every_byte_once_where_it_lies(units: list[tuple[int, int]], unit: int, data: st.DataObject):
    places = [Place(volume, slot * unit) for volume, slot in units]
    start = data.draw(st.integers(0, len(places) * unit - 1))
    nbytes = data.draw(st.integers(1, len(places) * unit - start))
    where = [(places[i // unit].volume, places[i // unit].offset + i % unit) for i in range(start, start + nbytes)]
    parts = runs(places, unit, start, nbytes)
    assert [(r.volume, r.offset + i) for r in parts for i in range(r.nbytes)] == where
    assert [r.start + i for r in parts for i in range(r.nbytes)] == list(range(start, start + nbytes))
    for a, b in pairwise(parts):
        assert (a.volume, a.offset + a.nbytes) != (b.volume, b.offset)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (5, 2, 1), (7,)])
def test_turns_follow_the_weights(weights: tuple[int, ...]):
    turns = Turns(weights)
    dealt = turns.deal([UNIT] * 80 * sum(weights), range(len(weights)))
    assert [Counter(dealt)[v] for v in range(len(weights))] == [80 * weight for weight in weights]
    small = Counter(turns.deal([4096] * 8 * sum(weights), range(len(weights))))
    assert [small[v] for v in range(len(weights))] == [8 * weight for weight in weights]


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    directories = tmp_path / "a", tmp_path / "b"
    for directory in directories:
        directory.mkdir()
    return directories


def filled(nbytes: int, seed: int = 0) -> torch.Tensor:
    return aligned_empty(nbytes).random_(0, 256, generator=torch.Generator().manual_seed(seed))


def shares(store: Store, extent: Extent) -> list[int]:
    counted = Counter()
    for run in runs(extent.places, extent.unit, 0, extent.capacity):
        counted[run.volume] += run.nbytes
    return [counted[v] for v in range(len(store.directories))]


def test_windows_of_a_striped_extent(two: tuple[Path, Path]):
    with Store(two, weights=(2, 1)) as store:
        extent = store.allocate(11 * UNIT + 12345)
        expected = filled(extent.capacity)
        store.write(extent, expected.data_ptr(), 0, extent.nbytes).wait()
        assert shares(store, extent) == [8 * UNIT, 3 * UNIT + 16384]
        for start, nbytes in [(0, extent.nbytes), (UNIT - 4096, 8192), (3 * UNIT + 4096, 5 * UNIT), (11 * UNIT, 12345)]:
            back = aligned_empty(nbytes)
            store.read(extent, back.data_ptr(), start, nbytes).wait()
            assert back.equal(expected[start : start + back.numel()])
            data = filled(nbytes, start)
            store.write(extent, data.data_ptr(), start, nbytes).wait()
            expected[start : start + data.numel()] = data
        back = aligned_empty(extent.nbytes)
        store.read(extent, back.data_ptr(), 0, extent.nbytes).wait()
        assert back.equal(expected)
        store.free(extent)
        assert store.in_use == 0
    assert not list(two[0].iterdir()) and not list(two[1].iterdir())


def test_small_extents_take_turns(two: tuple[Path, Path]):
    with Store(two, weights=(3, 1)) as store:
        places = [store.allocate(4096).places for _ in range(40)]
        assert Counter(place.volume for (place,) in places) == {0: 30, 1: 10}


def test_directories_on_one_device_share_a_queue(two: tuple[Path, Path], caplog: pytest.LogCaptureFixture):
    with Store(two) as store:
        assert store._turns.weights == (0.5, 0.5) and "same device" in caplog.text
        extent = store.allocate(4 * UNIT)
        data = filled(4 * UNIT)
        store.write(extent, data.data_ptr(), 0, 4 * UNIT).wait()
        assert store.counters().bytes_written == 4 * UNIT
        assert len(store._resources.engines) == 1


@pytest.fixture
def other_device(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory on another device than tmp_path."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or os.stat(shm).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no second device")
    place = shm / f"zinf-test-{os.getpid()}"
    place.mkdir()
    yield place
    place.rmdir()


def test_devices_have_queues_of_their_own(tmp_path: Path, other_device: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Store((tmp_path, other_device)) as store:
        assert len(store._resources.engines) == 2
        assert all(weight > MIB for weight in store._turns.weights)  # they were measured
        extents = [store.allocate(4096) for _ in range(200)]
        mine = [next(e for e in extents if e.places[0].volume == v) for v in (0, 1)]
        data, back = filled(4096), [aligned_empty(4096) for _ in mine]
        for extent in mine:
            store.write(extent, data.data_ptr(), 0, 4096).wait()
        first = store._volumes[0].engine
        inject(first, Fault("completion", delay=0.5))
        began = time.monotonic()
        slow = store.read(mine[0], back[0].data_ptr(), 0, 4096)
        store.read(mine[1], back[1].data_ptr(), 0, 4096).wait()
        assert time.monotonic() - began < 0.4 and not slow.done()
        slow.wait()


def test_an_error_on_one_volume_is_that_of_the_whole_and_all_is_over_by_then(two: tuple[Path, Path]):
    with Store(two) as store:
        extent = store.allocate(6 * UNIT)
        data = filled(6 * UNIT)
        inject(store, Fault("completion", nth=2, errno=errno.ENODEV))
        inject(store, Fault("completion", nth=5, delay=0.3))
        ticket = store.write(extent, data.data_ptr(), 0, 6 * UNIT)
        with pytest.raises(StoreError, match="gone") as caught:
            ticket.wait()
        assert ticket.done() and Path(caught.value.path).parents[1] in two


def test_one_directory_named_twice(two: tuple[Path, Path]):
    with pytest.raises(ConfigError, match="different"):
        Store((two[0], two[0] / ".." / "a"))
    with pytest.raises(ConfigError, match="needs one directory"):
        Store(())


def test_a_directory_that_is_missing_leaves_nothing_in_the_other(two: tuple[Path, Path]):
    with pytest.raises(StoreError, match="does not exist"):
        Store((two[0], two[1] / "absent"))
    assert not list(two[0].iterdir())


def test_a_full_volume_is_left_out(two: tuple[Path, Path]):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(two[1])], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no mount: {done.stderr.strip()}")
    try:
        with Store(two, weights=(1, 1)) as store:
            extent = store.allocate(8 * UNIT)
            assert shares(store, extent) == [8 * UNIT, 0]
            data, back = filled(8 * UNIT), aligned_empty(8 * UNIT)
            store.write(extent, data.data_ptr(), 0, 8 * UNIT).wait()
            store.read(extent, back.data_ptr(), 0, 8 * UNIT).wait()
            assert back.equal(data) and store.in_use == 8 * UNIT
            assert shares(store, store.allocate(UNIT)) == [0, UNIT]  # a smaller one fits there
    finally:
        subprocess.run(["umount", str(two[1])], check=True)


def test_memory_is_the_callers_again_when_only_some_stripes_could_be_queued(two: tuple[Path, Path], monkeypatch):
    with Store(two, weights=(1, 1)) as store:
        extent = store.allocate(2 * UNIT)
        memory = aligned_empty(2 * UNIT)
        store.write(extent, memory.data_ptr(), 0, 2 * UNIT).wait()
        inject(store, Fault("completion", operation="read", delay=0.2))
        submit, begun = File.submit, []

        def failing(file: File, *arguments: object, **options: object) -> FileTicket:
            if begun:
                raise StoreError("read", file.path, "the request can't be queued")
            begun.append(submit(file, *arguments, **options))
            return begun[0]

        monkeypatch.setattr(File, "submit", failing)
        with pytest.raises(StoreError, match="can't be queued"):
            store.read(extent, memory.data_ptr(), 0, 2 * UNIT)
        assert begun[0].done()
