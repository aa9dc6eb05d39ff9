"""Ranks agree on a new name, whatever earlier ones left in the store."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from zinf_fx.errors import RanksError
from zinf_fx.runtime.rendezvous import Rendezvous, agree_on_name
from zinf_fx.runtime.watchdog import Process


def attempt(store: dist.Store, size: int, order: Sequence[int] | None = None, timeout: float = 20.0) -> list[object]:
    """Return what each of so many ranks, which are threads here, finds or raises; they begin in this order."""
    results: list[object] = [None] * size

    def begin(rank: int) -> None:
        try:
            results[rank] = agree_on_name(store, rank, size, timeout)
        except RanksError as error:
            results[rank] = error

    threads = [threading.Thread(target=begin, args=[rank]) for rank in order or range(size)]
    for thread in threads:
        thread.start()
        thread.join(0.02)  # one is ahead of the next
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 4, 1, 2), (1, 3), (4, 4)])
@pytest.mark.parametrize("first", ["first", "last"])
def test_each_attempt_has_a_name_of_its_own(sizes: tuple[int, ...], first: str):
    store, names = dist.HashStore(), []
    for size in sizes:
        order = list(range(size)) if first == "first" else list(range(size))[::-1]
        results = attempt(store, size, order)
        name, processes = results[0]
        assert all(result == (name, processes) for result in results) and len(processes) == size
        assert set(processes) == {Process.of(os.getpid())}
        names.append(name)
    assert len(set(names)) == len(names)


def test_what_others_left_is_taken_for_nobody():
    """A hello, a welcome and an arrival of ranks that are dead."""
    store, dead = dist.HashStore(), json.dumps(["token", Process("here", 1, "0")])
    store.set("hello/1", dead)
    store.set("welcome", json.dumps(["old", [dead, dead]]))
    store.add("old/came", 2)
    (error,) = [result for result in attempt(store, 2, [0], timeout=0.2) if result is not None]
    assert isinstance(error, RanksError) and "rank(s) 1 did not come within collective_timeout (0.2 s)" in str(error)
    results = attempt(store, 2)
    assert results[0] == results[1] and results[0][0] != "old" and set(results[0][1]) == {Process.of(os.getpid())}


class Counting:
    """A store that counts what it is asked for."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.asked = store, []

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.asked.append(name)
        return getattr(self._store, name)


def test_the_last_to_come_decides_before_it_tidies_up_and_asks_nothing_more():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        rendezvous = Rendezvous.of(dist.group.WORLD, 15.0)
        rendezvous._store = store = Counting(rendezvous._store)
        rendezvous.meet("x", 15.0)
    finally:
        dist.destroy_process_group()
    assert store.asked == ["compare_set", "add", "compare_set", *["delete_key"] * 3]
