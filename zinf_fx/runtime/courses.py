"""What ranks wait for, as they tell each other, and when that is each other.

A course is a row of things that all ranks of a group do in the same order: their meetings, or their collectives. A rank
that waits for long says at which number of which course, and how far it is in each of its own. Two ranks wait for each
other when neither has come to what the other one waits for: each would have to go on to come there.
"""

from __future__ import annotations

import json
import threading
import weakref
from typing import ClassVar, NamedTuple

import torch.distributed as dist


class Course:
    """One that this rank takes part in.

    Attributes:
        name: the same on all ranks of the group, and of no other course.
        number: how many things this rank has come to.
        is_met: whether ranks meet in it, before they begin anything.
        given_up: the number up to which this rank waits for nothing any more.
        failed: why the ranks' collectives don't match any more; empty while they do.
    """

    _known: ClassVar[weakref.WeakValueDictionary[str, Course]] = weakref.WeakValueDictionary()

    def __init__(self, name: str, is_met: bool) -> None:
        self.name, self.is_met, self.number = name, is_met, 0
        self.given_up, self.failed = 0, ""
        self._known[name] = self

    @classmethod
    def numbers(cls) -> dict[str, int]:
        """How far this rank is in each."""
        return {name: course.number for name, course in list(cls._known.items())}

    @classmethod
    def known(cls, name: str) -> Course | None:
        return cls._known.get(name)


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

    def is_awaited_in_vain_by(self, mine: Point) -> bool:
        """Whether this rank, which waits at `mine`, keeps another one waiting that waits here, and is kept by it."""
        other = Course.known(self.course)
        return (
            other is not None
            and other.number < self.number
            and self.numbers.get(mine.course, mine.number) < mine.number
        )


class Waits:
    """Those of the ranks of torch.distributed. A rank where several threads wait says nothing: what one waits for may
    be done by another."""

    _threads: ClassVar[set[int]] = set()

    def __init__(self, store: dist.Store, rank: int) -> None:
        """`rank`: this one's, in all of torch.distributed."""
        self._store, self._rank = store, rank
        self._said = False

    def say(self, point: Point) -> bool:
        """Let the others know what this rank waits for; whether that is so."""
        self._threads.add(threading.get_ident())
        if len(self._threads) > 1:
            self.say_nothing()
            return False
        self._store.set(f"waits/{self._rank}", json.dumps(point))
        self._said = True
        return True

    def say_nothing(self) -> None:
        """Let them know that it goes on."""
        if self._said:
            self._said = False
            self._store.set(f"waits/{self._rank}", "")

    def of(self, rank: int) -> Point | None:
        """What another rank waits for, if it said so."""
        key = f"waits/{rank}"
        if self._store.check([key]) and (said := self._store.get(key).decode()):
            return Point(*json.loads(said))
        return None
