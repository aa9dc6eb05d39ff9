"""Collectives of tensors of a device: nobody waits for them in Python, and what takes long is named."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from zinf_fx.runtime.memory.device import MAKERS, Device
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.watchdog import DeviceWatchdog


class Queued:
    """A collective that a device has in its queue."""

    def __init__(self) -> None:
        self.is_over = False
        self.waits: list[tuple] = []

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, *timeout: object) -> bool:
        self.waits.append(timeout)
        return True

    def get_future(self) -> None:
        raise RuntimeError("not of this kind of work")


class Behind(Device):
    """One that does nothing of what is queued on it before it `caught_up`."""

    caught_up = False

    def mark(self) -> Callable[[], bool]:
        return lambda: self.caught_up


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Behind:
    """Return what computes with tensors on the meta device."""
    device = Behind()
    monkeypatch.setitem(MAKERS, "meta", lambda _: device)
    return device


class Unmet:
    """The rendezvous of one rank alone, which nobody else comes to."""

    def begin(self, what: str) -> int:
        return 1

    def naming(self, what: str, timeout: float) -> AbstractContextManager[None]:
        return nullcontext()


def alone(timeout: float) -> Ranks:
    """One rank, whose collectives are of no group."""
    ranks = Ranks(None, timeout)
    ranks._by_group[None] = Unmet()
    return ranks


class Said(logging.Handler):
    """The messages, and a moment at which there are so many."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._more:
            self.messages.append(record.getMessage())
            self._more.notify_all()

    def wait_for(self, count: int) -> bool:
        with self._more:
            return self._more.wait_for(lambda: len(self.messages) >= count, timeout=60)


@pytest.fixture
def said():
    handler, log = Said(), logging.getLogger("zinf_fx")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def test_a_wait_for_a_device_has_no_timeout(device: Behind) -> None:
    """With one, NCCL keeps the thread that launches until the collective is over."""
    work = Queued()
    ranks = alone(60.0)
    on_device = torch.empty(1, device="meta")
    collective = ranks._start(None, "all-gather of w", on_device, lambda *_, **__: work, None)
    collective.wait()
    collective.wait()
    assert work.waits == [()] and not collective.failed
    device.caught_up = True


def test_what_compute_waits_for_keeps_none_of_its_memory_and_is_named(device: Behind, said: Said) -> None:
    """The program runs ahead of the device, and memory goes to what it queues next."""
    ranks, queued = alone(0.5), [Queued()]
    work = weakref.ref(queued[0])
    collective = ranks._start(None, "all-gather of w", torch.empty(1, device="meta"), lambda **_: queued.pop(), None)
    assert work() is not None
    collective.wait()
    with ranks._device_watchdog._lock:  # its thread asks nothing now
        assert work() is None
    assert said.wait_for(1) and "all-gather of w" in said.messages[0]
    device.caught_up = True


def test_what_is_over_is_let_go_of_when_the_next_one_is_queued(device: Behind) -> None:
    watch = DeviceWatchdog("rank 0 of 2", timeout=60.0)
    for work in [Queued() for _ in range(3)]:
        watch.add(work, "reduce-scatter", device.mark)
        work.is_over = True
    last = Queued()
    watch.add(last, "reduce-scatter", device.mark)
    assert [queued.is_over for queued in watch._queued] == [last.is_completed]
    last.is_over = True


def test_the_first_collective_that_does_not_end_is_named_once(device: Behind, said: Said) -> None:
    watch = DeviceWatchdog("rank 1 of 2", timeout=0.5)
    first, second, third = Queued(), Queued(), Queued()
    first.is_over = True
    for work, what in ((first, "first"), (second, "all-gather of blocks.3.mlp"), (third, "third")):
        watch.add(work, what, device.mark)
    assert said.wait_for(1)
    second.is_over = True  # the third now takes long by itself
    assert said.wait_for(2)
    third.is_over = True
    assert [message.split(" s for ")[1].split(":")[0] for message in said.messages] == [
        "all-gather of blocks.3.mlp",
        "third",
    ]
    assert said.messages[0].startswith("rank 1 of 2 has waited ")


def test_collectives_that_end_are_not_named_and_their_thread_ends(device: Behind, said: Said) -> None:
    watch = DeviceWatchdog("rank 0 of 2", timeout=2.0)
    works = [Queued() for _ in range(3)]
    for work in works:
        work.is_over = True
        watch.add(work, "reduce-scatter", device.mark)
    thread = watch._thread
    assert thread is not None
    thread.join(timeout=60)
    assert not thread.is_alive() and not said.messages
    works.append(Queued())
    watch.add(works[-1], "all-gather", device.mark)
    assert watch._thread is not None and watch._thread is not thread
    works[-1].is_over = True
