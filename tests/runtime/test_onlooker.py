"""A rank tells what it waits for, whichever threads have come to meetings and ended before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from zinf_fx.runtime.onlooker import Onlooker


class NobodyEnded:
    """The presence of ranks that are all there."""

    def ended(self) -> list[int]:
        return []


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return dist.HashStore()


@pytest.fixture
def onlooker(store: dist.Store) -> Iterator[Onlooker]:
    onlooker = Onlooker(store, 0, NobodyEnded())
    yield onlooker
    onlooker.end()


def asks(onlooker: Onlooker, store: dist.Store, seconds: float) -> bool:
    """Whether the onlooker says within so many seconds that this rank waits."""
    end = time.monotonic() + seconds
    while not store.check(["late"]) and time.monotonic() < end:
        onlooker.ask()
        time.sleep(0.01)
    return store.check(["late"])


def test_it_says_nothing_while_another_thread_that_came_to_a_meeting_is_there(onlooker: Onlooker, store: dist.Store):
    came, ends = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (onlooker.arrive(1), came.set(), ends.wait(20)))
    thread.start()
    came.wait(20)
    onlooker.arrive(2)
    assert not asks(onlooker, store, 0.1)
    ends.set()
    thread.join()
    assert asks(onlooker, store, 10)
