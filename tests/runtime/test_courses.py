"""Ranks are told that they wait for each other when they do, and not while one of them goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from zinf_fx.runtime.courses import Course, Point, Waits


class Rank:
    """One of two ranks, which has two courses with the other one, and one with others."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.waits, self._store, self._rank = Waits(), store, rank
        self.met, self.begun = self.waits.course("met", True), self.waits.course("begun", False)
        self.elsewhere = self.waits.course("elsewhere", False)

    def look(self, course: Course) -> str:
        """What this rank waits for each time it looks; what the other one waits for, where that is a deadlock."""
        point = Point(course.name, course.number, "x", course.is_met, self.waits.numbers())
        if not self.waits.say(self._store, self._rank, point):
            return "nothing said"
        other = 1 - self._rank
        theirs = self.waits.deadlock(self._store, point, {other: other})
        return theirs[1].course if theirs else ""


@pytest.fixture
def pair() -> tuple[Rank, Rank]:
    """The first is in a meeting, the second in a collective, and neither has come to what the other is in."""
    store = dist.HashStore()
    first, second = Rank(store, 0), Rank(store, 1)
    first.met.number += 1
    second.begun.number += 1
    return first, second


def in_a_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_deadlock_is_one_at_two_looks(pair: tuple[Rank, Rank]):
    first, second = pair
    assert first.look(first.met) == "" and second.look(second.begun) == ""
    assert [first.look(first.met) for _ in range(2)] == ["", "begun"]
    assert second.look(second.begun) == "met"


# What happens between two looks of the first rank.
GOING_ON: dict[str, Callable[[Rank, Rank], object]] = {
    "the first begins something": lambda first, second: setattr(first.elsewhere, "number", 1),
    "the second begins something": lambda first, second: (
        setattr(second.elsewhere, "number", 1),
        second.look(second.begun),
    ),
    "the second goes on": lambda first, second: second.waits.say_nothing(),
    "the second goes on and waits again": lambda first, second: (
        second.waits.say_nothing(),
        setattr(second.begun, "number", 2),
        second.look(second.begun),
    ),
    "the second comes": lambda first, second: (setattr(second.met, "number", 1), second.look(second.begun)),
    "the first comes": lambda first, second: setattr(first.begun, "number", 1),
}


@pytest.mark.parametrize("what", list(GOING_ON))
def test_ranks_that_go_on_are_in_no_deadlock(pair: tuple[Rank, Rank], what: str):
    first, second = pair
    second.look(second.begun)
    assert first.look(first.met) == ""
    GOING_ON[what](first, second)
    assert first.look(first.met) == ""


def test_a_rank_says_nothing_while_two_threads_wait(pair: tuple[Rank, Rank]):
    first, second = pair
    second.look(second.begun)
    first.look(first.met)
    waits, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        first.look(first.begun)
        waits.set()
        goes_on.wait(20)
        first.waits.say_nothing()

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait(20)
    assert first.look(first.met) == "nothing said"
    assert [second.look(second.begun) for _ in range(2)] == ["", ""]
    goes_on.set()
    thread.join()
    assert [first.look(first.met) for _ in range(2)] == ["", "begun"]


def test_threads_that_have_waited_keep_nobody_from_saying_so(pair: tuple[Rank, Rank]):
    first, second = pair
    for rank, course in ((first, first.begun), (second, second.met)):
        in_a_thread(lambda rank=rank, course=course: (rank.look(course), rank.waits.say_nothing()))
    second.look(second.begun)
    assert [first.look(first.met) for _ in range(2)] == ["", "begun"]


def test_one_thread_that_goes_on_leaves_what_another_one_said(pair: tuple[Rank, Rank]):
    first, second = pair
    second.look(second.begun)
    assert first.look(first.met) == ""
    in_a_thread(second.waits.say_nothing)  # after a short wait of its own
    assert first.look(first.met) == "begun"
