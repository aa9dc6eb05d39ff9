"""Ranks agree on a new name, whatever earlier ones left in the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from zinf_fx.errors import RanksError
from zinf_fx.runtime.introduction import introduced
from zinf_fx.runtime.presence import Presence, Process


def attempt(store: dist.Store, size: int, order: Sequence[int] | None = None, timeout: float = 20.0) -> list[object]:
    """What each of so many ranks, which are threads here, finds or raises; they begin in this order."""
    found: list[object] = [None] * size

    def begin(rank: int) -> None:
        try:
            found[rank] = introduced(store, rank, size, timeout)
        except RanksError as error:
            found[rank] = error

    threads = [threading.Thread(target=begin, args=[rank]) for rank in order or range(size)]
    for thread in threads:
        thread.start()
        thread.join(0.02)  # one is ahead of the next
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 4, 1, 2), (1, 3), (4, 4)])
@pytest.mark.parametrize("first", ["first", "last"])
def test_each_attempt_has_a_name_of_its_own(sizes: tuple[int, ...], first: str):
    store, names = dist.HashStore(), []
    for size in sizes:
        order = list(range(size)) if first == "first" else list(range(size))[::-1]
        found = attempt(store, size, order)
        name, processes = found[0]
        assert all(one == (name, processes) for one in found) and len(processes) == size
        assert set(processes) == {Process.of(os.getpid())}
        names.append(name)
    assert len(set(names)) == len(names)


def test_what_others_left_is_taken_for_nobody():
    """A hello, a welcome and a presence of ranks that are dead."""
    store, dead = dist.HashStore(), json.dumps(["token", Process("here", 1, "0")])
    store.set("hello/1", dead)
    store.set("welcome", json.dumps(["old", [dead, dead]]))
    store.add("old/came", 2)
    (error,) = [found for found in attempt(store, 2, [0], timeout=0.2) if found is not None]
    assert isinstance(error, RanksError) and "rank(s) 1 did not come within collective_timeout (0.2 s)" in str(error)
    found = attempt(store, 2)
    assert found[0] == found[1] and found[0][0] != "old" and set(found[0][1]) == {Process.of(os.getpid())}


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
    near = Presence(store, 0, [here, gone, elsewhere])
    far = Presence(store, 2, [elsewhere, elsewhere, elsewhere._replace(machine=here.machine)])
    assert far.ended() == []
    assert near.ended() == far.ended() == [1]
    del near
    assert far.ended() == [0, 1]
    unknown = [here._replace(machine="")] * 2
    assert Presence(dist.HashStore(), 0, unknown).ended() == []


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
    killed, late = Presence(Mortal(store, writes), 0, processes), Presence(store, 0, processes)
    far = Presence(store, 2, processes)
    killed.ended()
    far.ended()
    leaves = Presence(store, 3, processes)
    del leaves
    assert 3 in far.ended()
    assert late.ended() == far.ended() == [1, 3]
