"""What is under way, first come first, and how many bytes that is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

IN_FLIGHT = 32 << 20
"""Bytes that are under way at a time in one direction, about."""

T = TypeVar("T")


class UnderWay(Generic[T]):
    """Things in a row, each with its bytes."""

    def __init__(self, most: int = IN_FLIGHT) -> None:
        """`most`: bytes that may be under way at a time, if that is more than one thing."""
        self._most = most
        self._things: deque[tuple[T, int]] = deque()
        self._nbytes = 0

    def add(self, thing: T, nbytes: int) -> None:
        """One more comes last."""
        self._things.append((thing, nbytes))
        self._nbytes += nbytes

    @property
    def first(self) -> T:
        """What came first."""
        return self._things[0][0]

    def end_first(self) -> None:
        """What came first is over."""
        self._nbytes -= self._things.popleft()[1]

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more may be under way."""
        return not self._things or self._nbytes + nbytes <= self._most

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[T]:
        return (thing for thing, _ in self._things)

    def clear(self) -> None:
        """All are over."""
        self._things.clear()
        self._nbytes = 0
