"""Ways that are compared take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Way = TypeVar("Way")


def in_turns(ways: Sequence[Way], rounds: int) -> Iterator[tuple[int, Way]]:
    """Yield the number of each round with each way. Every other round goes in the opposite order, so that no way always
    comes after the same one."""
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            yield number, way
