"""Members are cut into chunks: every element once, within the bound."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zinf_fx.plan.chunks import Member, charged, cut
from zinf_fx.sizes import WINDOW_ALIGNMENT

PARTS = st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 40_000)), min_size=1, max_size=3)


@given(st.lists(PARTS, max_size=12), st.integers(1, 4))
def test_cut_covers_every_element_once(shares: list[list[tuple[int, int]]], blocks: int):
    elements = blocks * WINDOW_ALIGNMENT
    members = [
        Member([range(50_000 * part + first, 50_000 * part + first + size) for part, (first, size) in enumerate(of)])
        for of in shares
    ]
    expected = deque((number, part.start) for number, member in enumerate(members) for part in member.parts)
    for chunk in cut(members, elements):
        assert 0 < sum(charged(len(piece.elements[0])) for piece in chunk) <= elements
        for piece in chunk:
            number, (some,) = piece.members.start, piece.elements
            assert piece.members == range(number, number + 1)
            *others, last = members[number].parts
            assert (number, some.start) == expected.popleft()
            part = next(part for part in [last, *reversed(others)] if some.start >= part.start)
            assert (some.start - part.start) % WINDOW_ALIGNMENT == 0
            ends = some.stop == part.stop
            assert piece.is_last == (ends and part is last)
            if not ends:
                assert len(some) % WINDOW_ALIGNMENT == 0 and len(some) > 0
                expected.appendleft((number, some.stop))
    assert not expected


@given(st.lists(st.tuples(st.integers(0, 20_000), st.booleans()), max_size=20), st.integers(1, 4))
def test_members_of_one_group_are_one_slice(sizes: list[tuple[int, bool]], blocks: int):
    elements, together = blocks * WINDOW_ALIGNMENT, 8_000
    members = [Member([range(size)], joins) for size, joins in sizes]
    chunks = list(cut(members, elements, together))
    assert all(sum(charged(len(part)) for piece in chunk for part in piece.elements) <= elements for chunk in chunks)
    slices = [piece for chunk in chunks for piece in chunk]
    runs = [piece for piece in slices if len(piece.members) > 1]
    for run in runs:
        assert run.is_last and run.elements == tuple(members[number].parts[0] for number in run.members)
        assert all(members[number].joins for number in run.members[1:])
        assert all(sizes[number][0] <= together for number in run.members)
    assert [number for piece in slices if piece.is_last for number in piece.members] == list(range(len(members)))
    for piece, other in pairwise(slices):
        counts = [charged(sizes[number][0]) for number in (*piece.members, *other.members)]
        fits = sum(counts) <= elements and max(sizes[n][0] for n in (*piece.members, *other.members)) <= together
        if piece.members != other.members and len(other.members) == 1 and fits:
            assert not members[other.members.start].joins


def test_small_members_share_a_chunk_with_slices_of_large_ones():
    members = [Member([range(10)]), Member([range(3 * WINDOW_ALIGNMENT + 5)]), Member([range(10)])]
    chunks = [
        [(piece.elements[0].start, len(piece.elements[0])) for piece in chunk]
        for chunk in cut(members, 2 * WINDOW_ALIGNMENT)
    ]
    assert chunks == [[(0, 10), (0, 4096)], [(4096, 8192)], [(12288, 5), (0, 10)]]
