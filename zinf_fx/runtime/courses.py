"""Ranks tell each other what they wait for, and find out when that is each other.

A course is a row of things that all ranks of a group do in the same order: their meetings, or their collectives. A rank
that waits for long says at which number of which course, and how far it is in each of its own. Two ranks wait for each
other when neither has come to what the other one waits for: each would have to go on to come there. One that computes
in a second thread may do so. So both have to be seen twice where they are, and to have begun nothing in between.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist


class Course:
    """A course that this rank takes part in.

    Attributes:
        name: the same on all ranks of the group, and of no other course.
        number: how many things this rank has come to.
        is_met: whether ranks meet in it, before they begin anything.
        given_up: the number up to which this rank waits for nothing any more.
        failed: why the ranks' collectives don't match any more; empty while they do.
    """

    def __init__(self, name: str, is_met: bool) -> None:
        self.name, self.is_met, self.number = name, is_met, 0
        self.given_up, self.failed = 0, ""


class Point(NamedTuple):
    """Something in a course, which a rank waits for.

    Attributes:
        what: names it.
        numbers: how far that rank is in each course.
    """

    course: str
    number: int
    what: str
    is_met: bool
    numbers: dict[str, int]

    def is_before(self, other: Point) -> bool:
        """Whether the rank that waits here has not come to another point, of a course that it takes part in."""
        return self.numbers.get(other.course, other.number) < other.number


class Waits:
    """This object holds the courses of a process, and tells the other ranks what it waits for in them. While several
    threads wait for long, it tells nothing: what one waits for may be done by another."""

    def __init__(self) -> None:
        self._courses: weakref.WeakValueDictionary[str, Course] = weakref.WeakValueDictionary()
        self._threads: set[int] = set()  # that wait for long, now
        self._said: tuple[dist.Store, str] | None = None  # where the others read what this rank waits for
        self._seen: tuple[Point, dict[int, Point]] | None = None  # at the last look: where this rank waits, and others

    def course(self, name: str, is_met: bool) -> Course:
        """A new course of this process."""
        self._courses[name] = course = Course(name, is_met)
        return course

    def numbers(self) -> dict[str, int]:
        """Return how far this rank is in each course."""
        return {name: course.number for name, course in list(self._courses.items())}

    def say(self, store: dist.Store, rank: int, point: Point) -> bool:
        """Let the others know what this thread waits for; whether it is said. `rank`: this one's, in all of
        torch.distributed."""
        self._threads.add(threading.get_ident())
        if len(self._threads) > 1:
            self._withdraw()
            return False
        self._said = store, _key(rank)
        store.set(self._said[1], json.dumps(point))
        return True

    def say_nothing(self) -> None:
        """Let the others know that this thread goes on."""
        if threading.get_ident() in self._threads:
            self._threads.discard(threading.get_ident())
            self._withdraw()

    def _withdraw(self) -> None:
        said, self._said, self._seen = self._said, None, None
        if said is not None:
            store, key = said
            store.set(key, "")

    def deadlock(self, store: dist.Store, mine: Point, ranks: Mapping[int, int]) -> tuple[int, Point] | None:
        """The first of the `ranks`, and where it waits, that waits for this one and is waited for by it, at this look
        and the last one. `ranks`: by their numbers in the group, those in all of torch.distributed."""
        points = {rank: point for rank, everywhere in ranks.items() if (point := _said_by(store, everywhere))}
        found = {rank: point for rank, point in points.items() if point.is_before(mine) and mine.is_before(point)}
        before, self._seen = self._seen, (mine, found)
        if before is None or before[0] != mine:
            return None
        return next(((rank, point) for rank, point in found.items() if before[1].get(rank) == point), None)


def _key(rank: int) -> str:
    return f"waits/{rank}"


def _said_by(store: dist.Store, rank: int) -> Point | None:
    """Return what a rank of torch.distributed waits for, if it said so."""
    if store.check([_key(rank)]) and (said := store.get(_key(rank)).decode()):
        return Point(*json.loads(said))
    return None
