"""Cutting covers every element once within the bound."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from zinf_fx.plan.chunks import cut
from zinf_fx.sizes import WINDOW_ALIGNMENT

PARTS = st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 40_000)), min_size=1, max_size=3)


@given(st.lists(PARTS, max_size=12), st.integers(1, 4))
def test_cut_covers_every_element_once(shares: list[list[tuple[int, int]]], blocks: int):
    elements = blocks * WINDOW_ALIGNMENT
    parameters = [
        (number, [range(50_000 * part + first, 50_000 * part + first + size) for part, (first, size) in enumerate(of)])
        for number, of in enumerate(shares)
    ]
    expected = deque((number, part.start) for number, updated in parameters for part in updated)
    for chunk in cut(parameters, elements):
        assert 0 < sum(max(-(-piece.count // WINDOW_ALIGNMENT), 1) for piece in chunk) <= blocks
        for piece in chunk:
            *others, last = dict(parameters)[piece.owner]
            assert (piece.owner, piece.start) == expected.popleft()
            part = next(one for one in [last, *reversed(others)] if piece.start >= one.start)
            assert (piece.start - part.start) % WINDOW_ALIGNMENT == 0
            ends = piece.start + piece.count == part.stop
            assert piece.last == (ends and part is last)
            if not ends:
                assert piece.count % WINDOW_ALIGNMENT == 0 and piece.count > 0
                expected.appendleft((piece.owner, piece.start + piece.count))
    assert not expected


def test_cut_packs_small_parameters_with_pieces_of_large_ones():
    parameters = [("small", [range(10)]), ("large", [range(3 * WINDOW_ALIGNMENT + 5)]), ("last", [range(10)])]
    chunks = [[(p.start, p.count) for p in chunk] for chunk in cut(parameters, 2 * WINDOW_ALIGNMENT)]
    assert chunks == [[(0, 10), (0, 4096)], [(4096, 8192)], [(12288, 5), (0, 10)]]
