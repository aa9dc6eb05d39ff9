"""Bytes in words: what is printed as an option is accepted as one, and is enough."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zinf_fx.config import parse_bytes
from zinf_fx.sizes import WINDOW_ALIGNMENT, at_least, at_most, pieces_of


@pytest.mark.parametrize(
    ("nbytes", "up", "down"),
    [
        (8, "8B", "8B"),
        (1023, "1023B", "1023B"),
        (1536, "1.5KiB", "1.5KiB"),
        (1537, "1.6KiB", "1.5KiB"),
        (27 << 30, "27GiB", "27GiB"),
        (28205006860, "26.3GiB", "26.2GiB"),
        ((1 << 30) - 1, "1GiB", "1023.9MiB"),
    ],
)
def test_sizes_as_options(nbytes: int, up: str, down: str) -> None:
    assert (at_least(nbytes), at_most(nbytes)) == (up, down)


@given(st.integers(1, 1 << 48))
@example((1 << 40) - 1)
def test_an_option_that_is_said_to_be_enough_is(nbytes: int) -> None:
    up, down = (parse_bytes(text, "budget") for text in (at_least(nbytes), at_most(nbytes)))
    assert down <= nbytes <= up <= 1.1 * nbytes + 1


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 1 << 18))
def test_pieces_are_all_elements_in_order(start: int, count: int, itemsize: int, nbytes: int) -> None:
    pieces = pieces_of(range(start, start + count), itemsize, nbytes)
    assert [end for part in pieces for end in (part.start, part.stop)][1:-1:2] == [part.start for part in pieces[1:]]
    assert sum(map(len, pieces)) == count and all(pieces)
    assert not pieces or (pieces[0].start, pieces[-1].stop) == (start, start + count)
    assert all((part.start - start) % WINDOW_ALIGNMENT == 0 for part in pieces)
    assert all(len(part) * itemsize <= max(nbytes, WINDOW_ALIGNMENT * itemsize) for part in pieces)
