"""Places for buffers that are needed at a time don't overlap, and little is lost between them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_fx.plan.memory.buffers import PlannedBuffer, profile
from zinf_fx.plan.memory.packing import Packing, pack
from zinf_fx.runtime.memory.freelist import FreeList

END = 40


def buffer(nbytes: int, *spans: tuple[int, int]) -> PlannedBuffer:
    return PlannedBuffer("tile", "", nbytes, tuple(range(*span) for span in spans))


def overlap(first: PlannedBuffer, other: PlannedBuffer) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a in first.spans for b in other.spans)


def check(buffers: Sequence[PlannedBuffer], packing: Packing) -> None:
    placed = list(zip(packing.offsets, buffers, strict=True))
    assert packing.nbytes == max((offset + b.nbytes for offset, b in placed), default=0)
    for (offset, a), (other, b) in itertools.combinations(placed, 2):
        assert not overlap(a, b) or offset + a.nbytes <= other or other + b.nbytes <= offset


@st.composite
def lifetimes(draw: st.DrawFn) -> PlannedBuffer:
    start, length = draw(st.integers(0, END - 1)), draw(st.integers(1, END))
    nbytes = draw(st.sampled_from([1, 1, 2, 3, 4, 8, 16, 60]))
    if length == END:
        return buffer(nbytes, (0, END))
    if start + length <= END:
        return buffer(nbytes, (start, start + length))
    return buffer(nbytes, (0, start + length - END), (start, END))


@settings(max_examples=100, deadline=None)
@given(buffers=st.lists(lifetimes(), max_size=24), bottom=st.integers(0, 2))
def test_no_two_overlap_and_at_most_half_is_lost(buffers: list[PlannedBuffer], bottom: int) -> None:
    packing = pack(buffers, END, min(bottom, len(buffers)))
    check(buffers, packing)
    assert packing.nbytes <= 2 * max(profile(buffers, END), default=0)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), count=st.integers(1, 12), nbytes=st.integers(1, 5))
def test_nothing_is_lost_where_a_step_streams(data: st.DataObject, count: int, nbytes: int) -> None:
    """Forward streams tiles, backward streams them in reverse; some stay from forward to backward, some over the step's
    end."""
    over_turn = data.draw(st.integers(0, count - 1))
    over_end = data.draw(st.integers(0, count - 1 - over_turn))
    end = 2 * count + 2
    turned = range(count - over_turn, count)
    ended = range(over_end)
    buffers = [buffer(nbytes, (n, 2 * count - n)) for n in turned]
    buffers += [buffer(nbytes, (0, n + 1), (2 * count - n - 1, end)) for n in ended]
    for n in set(range(count)) - {*turned, *ended}:
        buffers += [buffer(nbytes, (n, n + 1)), buffer(nbytes, (2 * count - n - 1, 2 * count - n))]
    packing = pack(buffers, end)
    check(buffers, packing)
    assert packing.nbytes == max(profile(buffers, end))


def test_what_is_to_lie_lowest_does() -> None:
    buffers = [buffer(3, (0, 2)), buffer(2, (1, 4)), buffer(9, (0, END)), buffer(5, (2, 9))]
    assert pack(buffers, END, bottom=2).offsets[:2] == (0, 3)


def test_places_fit_where_leases_fragment() -> None:
    """One after the other, each lease goes where there is room then; the third then finds none in one piece."""
    buffers = [buffer(1, (0, 2)), buffer(1, (1, 5)), buffer(2, (2, 5))]
    room = max(profile(buffers, 5))
    free = FreeList()
    free.give(0, room)
    first, second = free.take(1, 1), free.take(1, 1)
    assert (first, second) == (0, 1)
    free.give(first, 1)
    assert free.nbytes == 2 and free.take(2, 1) is None
    packing = pack(buffers, 5)
    check(buffers, packing)
    assert packing.nbytes == room == 3


def test_thousands_of_buffers_take_seconds_at_most() -> None:
    count = 3000
    buffers = [buffer(1 + n % 7, (3 * n, 3 * n + 12)) for n in range(count)] + [buffer(1, (0, 9100))] * count
    started = time.perf_counter()
    packing = pack(buffers, 9100)
    assert time.perf_counter() - started < 20
    assert packing.nbytes <= 1.1 * max(profile(buffers, 9100))
