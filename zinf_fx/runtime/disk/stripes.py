"""How an extent lies on several volumes: in units that take turns, weighted by what each device can move."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

UNIT = 4 << 20
"""Bytes of an extent that lie together on one volume: one transfer of the engine."""


@dataclass(frozen=True)
class Place:
    """Where a unit lies: a volume's number, and the offset in its data file in bytes."""

    volume: int
    offset: int


@dataclass(frozen=True)
class FilePart:
    """Consecutive bytes of an extent that are consecutive in one file too.

    Attributes:
        volume, offset: where they lie.
        start: their first byte in the extent.
        nbytes: how many.
    """

    volume: int
    offset: int
    start: int
    nbytes: int


def runs(places: Sequence[Place], unit: int, start: int, nbytes: int) -> list[FilePart]:
    """The parts of [start, start + nbytes) of an extent whose i-th `unit` bytes are at `places[i]`."""
    parts: list[FilePart] = []
    end = start + nbytes
    while start < end:
        place, inside = places[start // unit], start % unit
        length = min(unit - inside, end - start)
        last = parts[-1] if parts else None
        if last and last.volume == place.volume and last.offset + last.nbytes == place.offset + inside:
            parts[-1] = FilePart(last.volume, last.offset, last.start, last.nbytes + length)
        else:
            parts.append(FilePart(place.volume, place.offset + inside, start, length))
        start += length
    return parts


class Turns:
    """Whose turn it is: every volume gets bytes in proportion to its weight, over all extents together."""

    def __init__(self, weights: Sequence[float]) -> None:
        assert weights and all(weight > 0 for weight in weights), weights
        self.weights = tuple(weights)
        self._given = [0.0] * len(weights)
        self._lock = threading.Lock()

    def deal(self, sizes: Sequence[int], volumes: Sequence[int]) -> list[int]:
        """A volume of `volumes` for each piece of so many bytes: the one that has least for its weight by then."""
        dealt = []
        with self._lock:
            for nbytes in sizes:
                volume = min(volumes, key=lambda v: (self._given[v] + nbytes) / self.weights[v])
                self._given[volume] += nbytes
                dealt.append(volume)
        return dealt

    def take_back(self, volume: int, nbytes: int) -> None:
        """Bytes that `deal` gave and that are free again. Atomic enough for a finalizer: a lost update skews turns."""
        self._given[volume] -= nbytes
