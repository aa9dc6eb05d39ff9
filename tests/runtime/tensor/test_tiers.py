"""Tiers are shared by what has one store, and refused where gradients would go unreduced."""

from __future__ import annotations

import gc
import threading

import pytest

from zinf_fx.config import Config
from zinf_fx.runtime.memory.arena import Arena
from zinf_fx.runtime.memory.transfers import Counters
from zinf_fx.runtime.tensor import write_queue
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.runtime.tensor.write_queue import WriteQueue
from zinf_fx.sizes import PAGE


class Write:
    """One that is done when somebody waits for it."""

    def __init__(self) -> None:
        self.awaited = False

    def done(self) -> bool:
        return self.awaited

    def wait(self) -> None:
        self.awaited = True


def test_a_large_write_waits_for_those_before_it_and_not_for_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_queue, "_MAX_BYTES_WRITING", 3 * PAGE)
    queue, arena = WriteQueue(Counters()), Arena("host", 32 * PAGE)
    writes = [Write() for _ in range(5)]
    seen = []
    for write, pages in zip(writes, (1, 2, 8, 1, 2), strict=True):
        queue.add(write, arena.allocate(pages * PAGE), None)
        seen.append([queued.awaited for queued in writes].count(True))
    assert seen == [0, 0, 2, 3, 3]
    queue.drain()
    assert arena.in_use == 0 and all(write.awaited for write in writes)


def test_who_waits_for_writes_holds_up_nobody_else():
    waits, goes_on = threading.Event(), threading.Event()

    class Late(Write):
        def wait(self) -> None:
            waits.set()
            assert goes_on.wait(60)
            super().wait()

    queue, arena = WriteQueue(Counters()), Arena("host", 32 * PAGE)
    queue.add(Late(), arena.allocate(PAGE), None)
    waiting = threading.Thread(target=queue.drain)
    waiting.start()
    assert waits.wait(60)
    if is_free := queue.lock.acquire(timeout=1):
        queue.lock.release()
    goes_on.set()
    waiting.join(60)
    assert is_free and not queue and not arena.in_use


def test_one_store_directory_has_one_set_of_tiers(tmp_path):
    first = Tiers.of(Config(store=tmp_path))
    assert Tiers.of(Config(store=tmp_path, prefetch=None)) is first
    (tmp_path / "other").mkdir()
    assert Tiers.of(Config(store=tmp_path / "other")) is not first


def test_the_scratch_directory_is_made_on_first_use_and_goes_with_the_tiers(tmp_path):
    tiers = Tiers.of(Config(store=tmp_path))
    assert list(tmp_path.iterdir()) == []
    tiers.store.allocate(4096)
    assert len(list(tmp_path.iterdir())) == 1
    del tiers
    gc.collect()
    assert list(tmp_path.iterdir()) == []
