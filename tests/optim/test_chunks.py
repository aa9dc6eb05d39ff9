"""Cutting covers every element once within the bound; opening runs ahead, in order, and cleans up."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_fx.optim.chunks import cut, opened_ahead
from zinf_fx.runtime.storage import WINDOW_ALIGNMENT


@given(st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 40_000)), max_size=12), st.integers(1, 4))
def test_cut_covers_every_element_once(shares: list[tuple[int, int]], blocks: int):
    elements = blocks * WINDOW_ALIGNMENT
    parameters = [(number, range(first, first + size)) for number, (first, size) in enumerate(shares)]
    expected = deque((number, updated.start) for number, updated in parameters)
    for chunk in cut(parameters, elements):
        assert 0 < sum(max(-(-piece.count // WINDOW_ALIGNMENT), 1) for piece in chunk) <= blocks
        for piece in chunk:
            updated = dict(parameters)[piece.parameter]
            assert (piece.parameter, piece.start) == expected.popleft()
            assert (piece.start - updated.start) % WINDOW_ALIGNMENT == 0
            assert piece.last == (piece.start + piece.count == updated.stop)
            if not piece.last:
                assert piece.count % WINDOW_ALIGNMENT == 0 and piece.count > 0
                expected.appendleft((piece.parameter, piece.start + piece.count))
    assert not expected


def test_cut_packs_small_parameters_with_pieces_of_large_ones():
    parameters = [("small", range(10)), ("large", range(3 * WINDOW_ALIGNMENT + 5)), ("last", range(10))]
    chunks = [[(p.start, p.count) for p in chunk] for chunk in cut(parameters, 2 * WINDOW_ALIGNMENT)]
    assert chunks == [[(0, 10), (0, 4096)], [(4096, 8192)], [(12288, 5), (0, 10)]]


class Chunk:
    def __init__(self, name: int, log: list[str]) -> None:
        self.name, self.log = name, log
        log.append(f"open {name}")

    def close(self) -> None:
        self.log.append(f"close {self.name}")


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_opened_ahead(ahead: int):
    log: list[str] = []
    for chunk in opened_ahead(range(5), lambda name: Chunk(name, log), ahead):
        log.append(f"use {chunk.name}")
    assert [line for line in log if line.startswith("use")] == [f"use {k}" for k in range(5)]
    for k in range(5 - ahead):
        assert log.index(f"use {k}") == log.index(f"open {k + ahead}") + 1


def test_what_was_opened_ahead_is_closed():
    log: list[str] = []
    chunks = opened_ahead(range(5), lambda name: Chunk(name, log), 2)
    next(chunks)
    chunks.close()
    assert log == ["open 0", "open 1", "open 2", "close 1", "close 2"]
