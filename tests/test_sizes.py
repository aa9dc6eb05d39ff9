"""Bytes in words: what is printed as an option is accepted as one, and is enough."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zinf_fx.config import parse_bytes
from zinf_fx.sizes import at_least, at_most


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
