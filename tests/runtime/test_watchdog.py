"""What a rank knows of the others: which ended, and that they wait for each other when they do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from zinf_fx.runtime.watchdog import CallSequence, Process, WaitPoint, Waits, Watchdog


class Rank:
    """One of two ranks, which has two call sequences with the other one, and one with others."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.waits, self._store, self._rank = Waits(), store, rank
        self.met, self.begun = self.waits.sequence("met", True), self.waits.sequence("begun", False)
        self.elsewhere = self.waits.sequence("elsewhere", False)

    def look(self, calls: CallSequence) -> str:
        """Return what this rank waits for each time it looks; what the other one waits for, where that is a
        deadlock."""
        point = WaitPoint(calls.name, calls.number, "x", calls.is_rendezvous, self.waits.numbers())
        if not self.waits.publish(self._store, self._rank, point):
            return "nothing said"
        other = 1 - self._rank
        theirs = self.waits.deadlock(self._store, point, {other: other})
        return theirs[1].sequence if theirs else ""


@pytest.fixture
def pair() -> tuple[Rank, Rank]:
    """The first is in a rendezvous, the second in a collective, and neither has come to what the other is in."""
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
    "the second goes on": lambda first, second: second.waits.withdraw(),
    "the second goes on and waits again": lambda first, second: (
        second.waits.withdraw(),
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
        first.waits.withdraw()

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
    for rank, calls in ((first, first.begun), (second, second.met)):
        in_a_thread(lambda rank=rank, calls=calls: (rank.look(calls), rank.waits.withdraw()))
    second.look(second.begun)
    assert [first.look(first.met) for _ in range(2)] == ["", "begun"]


def test_one_thread_that_goes_on_leaves_what_another_one_said(pair: tuple[Rank, Rank]):
    first, second = pair
    second.look(second.begun)
    assert first.look(first.met) == ""
    in_a_thread(second.waits.withdraw)  # after a short wait of its own
    assert first.look(first.met) == "begun"


@pytest.mark.parametrize("how", ["ends", "is killed", "is another one"])
def test_a_process_is_gone_once_it_ended(how: str):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(child.pid)
    assert not process.is_gone()
    if how == "is another one":
        assert process._replace(started="1").is_gone()
    if how == "is killed":
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its end yet
        assert process.is_gone()
    child.communicate(b"\n" if how != "is killed" else None)
    assert process.is_gone()


def test_a_rank_on_another_machine_is_known_to_have_ended_by_those_who_saw_it():
    store, here = dist.HashStore(), Process.of(os.getpid())
    gone, elsewhere = here._replace(started="1"), here._replace(machine="another", started="1")
    near = Watchdog(store, 0, [here, gone, elsewhere])
    far = Watchdog(store, 2, [elsewhere, elsewhere, elsewhere._replace(machine=here.machine)])
    assert far.ended() == []
    assert near.ended() == far.ended() == [1]
    near.end()
    assert far.ended() == [0, 1]
    unknown = [here._replace(machine="")] * 2
    assert Watchdog(dist.HashStore(), 0, unknown).ended() == []


class Mortal:
    """A store of a rank that is killed after so many writes."""

    def __init__(self, store: dist.Store, writes: int) -> None:
        self._store, self._writes = store, writes

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self._writes -= name in ("set", "add")
            if self._writes < 0:
                raise RuntimeError("the rank is gone")
            return getattr(self._store, name)(*arguments)

        return call


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_rank_that_is_killed_while_it_says_who_ended_hides_no_other_end(writes: int):
    store, here = dist.HashStore(), Process.of(os.getpid())
    gone, elsewhere = here._replace(started="1"), here._replace(machine="another")
    processes = [here, gone, elsewhere, elsewhere]
    killed, late = Watchdog(Mortal(store, writes), 0, processes), Watchdog(store, 0, processes)
    far = Watchdog(store, 2, processes)
    killed.ended()
    far.ended()
    Watchdog(store, 3, processes).end()
    assert 3 in far.ended()
    assert late.ended() == far.ended() == [1, 3]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return dist.HashStore()


@pytest.fixture
def watchdog(store: dist.Store) -> Iterator[Watchdog]:
    watchdog = Watchdog(store, 0, [Process.of(os.getpid())])
    watchdog.start()
    yield watchdog
    watchdog.end()


def asks(watchdog: Watchdog, store: dist.Store, seconds: float) -> bool:
    """Return whether the watchdog says within so many seconds that this rank waits."""
    end = time.monotonic() + seconds
    while not store.check(["late"]) and time.monotonic() < end:
        watchdog.ask()
        time.sleep(0.01)
    return store.check(["late"])


def test_a_rank_says_nothing_while_another_thread_comes_to_a_rendezvous(watchdog: Watchdog, store: dist.Store):
    came, ends = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (watchdog.arrive(1), came.set(), ends.wait(20)))
    thread.start()
    came.wait(20)
    watchdog.arrive(2)
    assert not asks(watchdog, store, 0.1)
    ends.set()
    thread.join()
    assert asks(watchdog, store, 10)
