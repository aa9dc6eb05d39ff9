"""Whatever the store reads is what was written last, or an error that names the file and the page."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gate import providers

from zinf_fx.errors import StoreError
from zinf_fx.runtime.disk.store import Extent, Store
from zinf_fx.runtime.memory.host import aligned_empty

PAGE = 4096
NBYTES = (4 << 20) + 5 * PAGE + 100  # two of the engine's blocks, and a tail
PAGES = -(-NBYTES // PAGE)


@pytest.fixture(params=providers())
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    try:
        made = Store(tmp_path, provider=request.param)
    except StoreError as error:
        assert request.param == "libaio"
        pytest.skip(str(error))
    yield made
    made.close()


def filled(nbytes: int, seed: int) -> torch.Tensor:
    return aligned_empty(nbytes).random_(0, 256, generator=torch.Generator().manual_seed(seed))


def write(store: Store, extent: Extent, data: torch.Tensor, offset: int = 0) -> None:
    store.write(extent, data.data_ptr(), offset, data.numel()).wait()


def read(store: Store, extent: Extent, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
    back = aligned_empty(extent.nbytes - offset if nbytes is None else nbytes)
    store.read(extent, back.data_ptr(), offset, back.numel()).wait()
    return back


def on_disk(store: Store, offset: int, nbytes: int) -> bytes:
    with open(store.path, "rb") as file:
        return os.pread(file.fileno(), nbytes, offset)


def tamper(store: Store, offset: int, content: bytes) -> None:
    with open(store.path, "r+b") as file:
        os.pwrite(file.fileno(), content, offset)


def assert_bad_page(store: Store, extent: Extent, page: int) -> None:
    """Reading the extent fails with the place of the first bad page."""
    with pytest.raises(StoreError, match="not the bytes written last") as caught:
        read(store, extent)
    error = caught.value
    assert (error.operation, error.path, error.errno) == ("read", str(store.path), errno.EBADMSG)
    assert (error.offset, error.length) == (extent.offset + page * PAGE, PAGE)
    assert f"at offset {error.offset}" in str(error)
    with pytest.raises(StoreError):
        read(store, extent, page * PAGE, 1)


@pytest.mark.parametrize("position", [0, 4 << 20, NBYTES - 1])
def test_a_flipped_bit(store: Store, position: int):
    extent = store.allocate(NBYTES)
    write(store, extent, filled(NBYTES, 1))
    place = extent.offset + position
    tamper(store, place, bytes([on_disk(store, place, 1)[0] ^ 0x10]))
    bad = position // PAGE
    assert_bad_page(store, extent, bad)
    for good in {0, 1, PAGES - 2, PAGES - 1} - {bad}:
        read(store, extent, good * PAGE, 1)


def test_a_truncated_file(store: Store):
    extent = store.allocate(NBYTES)
    write(store, extent, filled(NBYTES, 1))
    end = extent.offset + 3 * PAGE + 5
    os.truncate(store.path, end)
    with pytest.raises(StoreError, match="the file ended") as caught:
        read(store, extent)
    error = caught.value
    assert (error.path, error.errno) == (str(store.path), errno.ENODATA)
    assert error.offset is not None and error.length is not None
    assert error.offset + error.length > end
    read(store, extent, 0, 3 * PAGE)


def test_two_swapped_extents(store: Store):
    first, second = store.allocate(NBYTES), store.allocate(NBYTES)
    write(store, first, filled(NBYTES, 1))
    write(store, second, filled(NBYTES, 2))
    first_bytes, second_bytes = (on_disk(store, extent.offset, extent.capacity) for extent in (first, second))
    tamper(store, first.offset, second_bytes)
    tamper(store, second.offset, first_bytes)
    assert_bad_page(store, first, 0)
    assert_bad_page(store, second, 0)


def test_two_swapped_pages(store: Store):
    extent = store.allocate(NBYTES)
    write(store, extent, filled(NBYTES, 1))
    fifth, sixth = (on_disk(store, extent.offset + page * PAGE, PAGE) for page in (5, 6))
    tamper(store, extent.offset + 5 * PAGE, sixth + fifth)
    with pytest.raises(StoreError) as caught:
        read(store, extent)
    assert caught.value.offset == extent.offset + 5 * PAGE


def test_stale_data_of_a_write_that_was_lost(store: Store):
    extent = store.allocate(NBYTES)
    write(store, extent, filled(NBYTES, 1))
    before = on_disk(store, extent.offset, extent.capacity)
    write(store, extent, filled(PAGE, 2), 7 * PAGE)
    tamper(store, extent.offset, before)
    assert_bad_page(store, extent, 7)


def test_partial_writes_of_any_pages_are_verified_by_reads_of_any_pages(store: Store):
    extent = store.allocate(NBYTES)
    expected = filled(NBYTES, 0)
    write(store, extent, expected)
    for seed, (page, pages) in enumerate([(0, 1), (3, 2), (PAGES - 1, 1), (1000, 25), (2, 999)], start=1):
        data = filled(pages * PAGE, seed)
        write(store, extent, data, page * PAGE)
        expected[page * PAGE : (page + pages) * PAGE] = data
        assert read(store, extent).equal(expected)
        assert read(store, extent, PAGE, 7 * PAGE).equal(expected[PAGE : 8 * PAGE])


def test_what_was_never_written_can_be_read(store: Store):
    extent = store.allocate(NBYTES)
    read(store, extent)
    data = filled(PAGE, 1)
    write(store, extent, data, 2 * PAGE)
    assert read(store, extent)[2 * PAGE : 3 * PAGE].equal(data)


def test_an_extent_that_was_freed_can_neither_be_used_nor_be_mistaken_for_the_next(store: Store):
    old = store.allocate(NBYTES)
    write(store, old, filled(NBYTES, 1))
    store.free(old)
    new = store.allocate(NBYTES)
    assert (new.offset, new.capacity) == (old.offset, old.capacity) and new != old
    data = filled(NBYTES, 2)
    write(store, new, data)
    with pytest.raises(AssertionError, match="not allocated"):
        read(store, old)
    with pytest.raises(AssertionError, match="freed before"):
        store.free(old)
    assert read(store, new).equal(data)


def test_the_counters_tell_what_the_checksums_cost(store: Store):
    extent = store.allocate(NBYTES)
    write(store, extent, filled(NBYTES, 1))
    read(store, extent)
    counters = store.counters()
    assert counters.bytes_checked == 2 * extent.capacity and counters.check_seconds > 0


def test_checksums_can_be_left_out(tmp_path: Path):
    with Store(tmp_path, checksum=False) as store:
        extent = store.allocate(NBYTES)
        write(store, extent, filled(NBYTES, 1))
        tamper(store, extent.offset, b"\x00\x01\x02\x03")
        assert read(store, extent)[:4].tolist() == [0, 1, 2, 3]
        assert store.counters().bytes_checked == 0
