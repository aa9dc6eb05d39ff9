"""The arena has exact leases, reuses memory, and explains its exhaustion."""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_fx.errors import StoreError
from zinf_fx.runtime.memory.arena import Arena
from zinf_fx.runtime.memory.freelist import FreeList, Space
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.sizes import HUGE_PAGE, PAGE, round_up


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("asked", "capacity", "alignment"),
    [
        (0, PAGE, PAGE),
        (1, PAGE, PAGE),
        (PAGE, PAGE, PAGE),
        (PAGE + 1, 2 * PAGE, PAGE),
        (HUGE_PAGE, HUGE_PAGE, HUGE_PAGE),
        (3 * HUGE_PAGE + 1, 3 * HUGE_PAGE + PAGE, HUGE_PAGE),
    ],
)
def test_a_lease_is_exact_and_aligned(asked: int, capacity: int, alignment: int):
    arena = Arena("host", 16 << 20)
    arena.allocate(PAGE)
    buffer = arena.allocate(asked)
    assert (buffer.nbytes, buffer.capacity, buffer.address % alignment) == (asked, capacity, 0)
    assert arena.in_use == arena.peak == PAGE + capacity


def test_tensors_lie_in_the_memory():
    arena = Arena("host", 1 << 20)
    buffer = arena.allocate(5000)
    a, b = buffer.tensor((10, 50), torch.float32), buffer.tensor((500,), torch.int32)
    assert a.data_ptr() == b.data_ptr() == buffer.address
    assert a.is_contiguous() and not a._is_view()
    versions = a._version, b._version
    a.fill_(1.0)
    assert b.eq(0x3F800000).all()
    assert (a._version, b._version) == (versions[0] + 1, versions[1])
    assert buffer.tensor((), torch.bfloat16).shape == ()
    assert buffer.tensor((0, 3), torch.float32).shape == (0, 3)
    with pytest.raises(AssertionError, match="needs 8196 bytes, the buffer has 8192"):
        buffer.tensor((2049,), torch.float32)


def test_released_memory_is_reused():
    arena = Arena("host", 1 << 20)
    buffers = [arena.allocate(64 << 10) for _ in range(16)]
    addresses = [buffer.address for buffer in buffers]
    for buffer in buffers[3:6]:
        buffer.release()
    assert arena.allocate(3 * (64 << 10)).address == addresses[3]
    assert arena.in_use == arena.peak == arena.capacity == 1 << 20


def test_two_releases_are_one_too_many():
    buffer = Arena("host", 1 << 20).allocate(1)
    buffer.release()
    with pytest.raises(AssertionError, match="released twice"):
        buffer.release()
    with pytest.raises(AssertionError, match="released buffer"):
        buffer.tensor((1,), torch.uint8)


def test_exhaustion_says_what_to_do():
    arena = Arena("host", 1 << 20, option="host_memory")
    arena.allocate(1 << 19)
    with pytest.raises(StoreError, match=r"host: 585.9 KiB asked for, 512.0 KiB of 1.0 MiB .* raise host_memory"):
        arena.allocate(600_000)


def test_only_touched_memory_is_resident_and_trim_gives_it_back():
    arena = Arena("host", 64 << 30)
    before = resident_bytes()
    buffer, kept = arena.allocate(64 << 20), arena.allocate(4 << 20)
    buffer.tensor((64 << 20,), torch.uint8).fill_(7)
    kept.tensor((4 << 20,), torch.uint8).fill_(7)
    assert resident_bytes() - before > 60 << 20
    buffer.release()
    assert resident_bytes() - before > 60 << 20
    arena.trim()
    assert resident_bytes() - before < 16 << 20
    assert kept.tensor((4 << 20,), torch.uint8).eq(7).all()


def test_tensors_outlive_the_arena():
    arena = Arena("host", 4 << 20)
    buffer = arena.allocate(PAGE)
    view = buffer.tensor((PAGE,), torch.uint8).fill_(3)
    buffer.release()
    del arena, buffer
    assert view.eq(3).all()


def test_a_forked_child_does_not_have_the_memory():
    buffer = Arena("host", 4 << 20).allocate(PAGE)
    view = buffer.tensor((PAGE,), torch.uint8).fill_(1)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        view[0].item()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -11
    assert view.eq(1).all()


def test_threads_never_share_a_buffer():
    arena = Arena("host", 8 << 20)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for turn in range(300):
            buffer = arena.allocate(1 + (turn * 7919 + mark) % 200_000)
            view = buffer.tensor((buffer.nbytes,), torch.uint8).fill_(mark)
            if not view.eq(mark).all():
                wrong.append(mark)
            buffer.release()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and arena.in_use == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.sampled_from([1, 2, 8])), max_size=60))
def test_the_free_list_never_hands_out_a_unit_twice(steps: list[tuple[bool, int, int]]):
    size = 100
    free, taken = FreeList(), {}
    free.give(0, size)
    for take, number, alignment in steps:
        if take or not taken:
            start = free.take(number, alignment)
            if start is None:
                assert all(round_up(a, alignment) + number > b for a, b in free)
                continue
            assert start % alignment == 0
            taken[start] = number
        else:
            start = sorted(taken)[number % len(taken)]
            free.give(start, taken.pop(start))
        pieces = sorted([*free, *((a, a + n) for a, n in taken.items())])
        assert sum(b - a for a, b in pieces) == size
        assert all(a[1] <= b[0] for a, b in pairwise(pieces))
        assert all(a[1] < b[0] for a, b in pairwise(free))


def test_giving_back_never_waits_for_the_lock():
    """A finalizer may run in the thread that holds it."""
    space = Space()
    space.extend(0, 100)
    start = space.take(30, 1)
    space.visit_free(lambda *_: space.give(start, 30))
    assert (space.in_use, space.peak) == (0, 30)
    start = space.take(30, 1)
    space.visit_free(lambda *_: space.give(start, 30))
    assert space.take(100, 1) == 0


def test_leases_released_by_the_garbage_collector():
    """Cycles whose finalizers release a lease, collected wherever the collector happens to run."""
    arena = Arena("host", 4 << 20)

    class Holder:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, arena.allocate(PAGE).release)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(2000):
            Holder()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert arena.in_use == 0


def test_aligned_empty_is_ordinary_memory():
    data = aligned_empty(5000)
    assert (data.dtype, data.numel(), data.data_ptr() % PAGE) == (torch.uint8, 8192, 0)
    assert aligned_empty(0).numel() == 0
    large = aligned_empty(HUGE_PAGE + 1)
    assert (large.numel(), large.data_ptr() % HUGE_PAGE) == (HUGE_PAGE + PAGE, 0)
