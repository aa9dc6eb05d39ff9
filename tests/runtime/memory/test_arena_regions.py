"""Planned places are handed out where they are free, and else another; the rest of the arena is for all others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from zinf_fx.config import Config
from zinf_fx.errors import StoreError
from zinf_fx.plan.schedule import MemoryRegions
from zinf_fx.runtime.memory.arena import Arena, Buffer
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import HUGE_PAGE, PAGE

MIB = 1 << 20


def offset(arena: Arena, buffer: Buffer) -> int:
    return buffer.address - arena._address


def test_a_place_is_given_where_it_is_free() -> None:
    arena = Arena("host", 64 * MIB)
    living = arena.allocate(3 * MIB)
    arena.reserve(8 * MIB)
    start = arena._region.start
    assert start >= 3 * MIB and start % HUGE_PAGE == 0
    buffer = arena.allocate_in(range(PAGE, PAGE + 5000), 5000 - PAGE)
    assert offset(arena, buffer) == start + PAGE and buffer.capacity == PAGE
    assert arena.allocate_in(range(PAGE, 2 * PAGE), PAGE) is None
    buffer.release()
    assert offset(arena, arena.allocate_in(range(PAGE, 2 * PAGE), PAGE)) == start + PAGE
    assert arena.allocate_in(range(8 * MIB - PAGE, 8 * MIB + PAGE), 2 * PAGE) is None  # beyond the region
    assert arena.allocate_in(range(8 * MIB - PAGE, 8 * MIB + PAGE), PAGE) is not None
    living.release()


def test_others_keep_out_of_the_region_while_they_can() -> None:
    arena = Arena("host", 16 * MIB)
    below = arena.allocate(2 * MIB)
    arena.reserve(8 * MIB)
    start, stop = arena._region.start, arena._region.stop
    below.release()
    buffers = [arena.allocate(MIB) for _ in range(8)]
    assert all(not start <= offset(arena, buffer) < stop for buffer in buffers)
    inside = [arena.allocate(MIB) for _ in range(8)]
    assert all(start <= offset(arena, buffer) < stop for buffer in inside)
    assert arena.allocate_in(range(MIB), MIB) is None
    with pytest.raises(StoreError, match="raise host_memory"):
        arena.allocate(1)


def test_a_region_grows_where_it_is_or_moves() -> None:
    arena = Arena("host", 64 * MIB)
    arena.reserve(4 * MIB)
    start = arena._region.start
    held = arena.allocate_in(range(MIB), MIB)
    arena.reserve(6 * MIB)
    arena.reserve(2 * MIB)
    assert arena._region == range(start, start + 6 * MIB)
    beside = arena.allocate(MIB)  # right behind it
    arena.reserve(8 * MIB)
    assert len(arena._region) == 8 * MIB and arena._region.start >= offset(arena, beside) + MIB
    arena.reserve(65 * MIB)  # there is no room: the plan's leases go anywhere
    assert len(arena._region) == 8 * MIB
    held.release()
    beside.release()
    assert arena.in_use == 0


def test_trim_spares_the_region() -> None:
    arena = Arena("host", 64 * MIB)
    first, second = arena.allocate(4 * MIB), arena.allocate(4 * MIB)
    values = [buffer.tensor((4 * MIB,), torch.uint8).fill_(7) for buffer in (first, second)]
    first.release()
    second.release()
    arena.reserve(4 * MIB)
    assert arena._region.start == 0
    arena.trim()
    assert values[0].eq(7).all() and values[1].eq(0).all()


def test_what_was_touched_is_counted_once() -> None:
    arena = Arena("host", 64 * MIB)
    arena.reserve(8 * MIB)
    kept = arena.allocate(PAGE)
    arena.restart_peak()
    for _ in range(3):
        for start in (0, PAGE, 3 * PAGE):
            arena.allocate_in(range(start, start + 2 * PAGE), 2 * PAGE).release()
    assert arena.touched == 6 * PAGE and arena.peak == 3 * PAGE and arena.in_use == PAGE
    kept.release()
    arena.restart_peak()
    assert arena.touched == arena.peak == 0


def test_places_and_leases_never_share_a_byte() -> None:
    """Drawn at random, whoever has a buffer finds in it what it wrote."""
    generator = random.Random(0)
    arena = Arena("host", 2 * MIB)
    arena.reserve(MIB)
    held: list[tuple[Buffer, torch.Tensor, int]] = []
    for mark in range(3000):
        nbytes = generator.randrange(1, 40) * 1024
        if generator.random() < 0.6:
            at = generator.randrange(0, 300) * PAGE
            buffer = arena.allocate_in(range(at, at + nbytes + generator.choice([0, 0, 100_000])), nbytes)
        else:
            try:
                buffer = arena.allocate(nbytes)
            except StoreError:
                buffer = None
        if buffer is not None:
            held.append((buffer, buffer.tensor((nbytes,), torch.uint8).fill_(mark % 251), mark % 251))
        while len(held) > 20 or (held and buffer is None):
            old, values, written = held.pop(generator.randrange(len(held)))
            assert values.eq(written).all()
            old.release()
            buffer = old
    assert arena.in_use == sum(buffer.capacity for buffer, _, _ in held)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    made = Tiers(Config(store=tmp_path, host_memory="4MiB"))
    made.plan(MemoryRegions(host=2 * MIB, chunks=MIB, chunk_elements=PAGE), 2 * MIB)
    return made


def test_a_taken_place_is_counted_and_another_found(tiers: Tiers) -> None:
    buffer, other = tiers.allocate(PAGE, offset=MIB), tiers.allocate(PAGE, offset=MIB)
    assert buffer.address != other.address
    assert (tiers.counters.placed, tiers.counters.displaced) == (1, 1)


class Write:
    """The ticket of a write that is over when somebody waits for it."""

    over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


def test_a_place_is_free_when_the_write_from_it_is_done(tiers: Tiers) -> None:
    first = tiers.allocate(PAGE, offset=MIB)
    address, write = first.address, Write()
    tiers.writes.add(write, first, None)
    assert tiers.allocate(PAGE, offset=MIB).address != address
    write.over = True
    assert tiers.allocate(PAGE, offset=MIB).address == address


def test_chunks_have_their_room_and_take_turns_in_it(tiers: Tiers) -> None:
    region = tiers.host._address + tiers.host._region.start
    with tiers.stepping():
        assert tiers.allocate(PAGE).address == region
        with tiers.stepping(range(MIB // 2, 2 * MIB)):
            part = [tiers.allocate(MIB // 4).address - region for _ in range(3)]
    assert part[:2] == [MIB // 2, 3 * MIB // 4] and not 0 <= part[2] < 2 * MIB
    assert not 0 <= tiers.allocate(PAGE).address - region < 2 * MIB


def test_writes_from_the_room_for_more_chunks_go_on_while_others_come_and_go(tmp_path: Path) -> None:
    tiers = Tiers(Config(store=tmp_path, host_memory="4MiB"))
    tiers.plan(MemoryRegions(host=2 * MIB, chunks=MIB, chunk_elements=PAGE, chunk_count=4), 2 * MIB)
    of_chunk, other = Write(), Write()
    with tiers.stepping(range(MIB // 4)):
        chunk = tiers.allocate(PAGE)
    tiers.write(of_chunk, chunk, None)
    tiers.write(other, tiers.allocate(PAGE, offset=MIB), None)
    tiers.limit_writes(0)
    assert other.over and not of_chunk.over and tiers.is_writing
    assert not tiers.is_vacant(range(MIB // 4)) and tiers.is_vacant(range(MIB // 4, MIB // 2))
    with tiers.stepping(range(MIB // 4)):
        again = tiers.allocate(PAGE)
    assert of_chunk.over and again.address == chunk.address
    tiers.write(of_chunk := Write(), again, None)
    tiers.drain()
    assert of_chunk.over and not tiers.is_writing
