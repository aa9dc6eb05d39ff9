"""Waits run in threads that are used again, whoever asks for one at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zinf_fx.runtime import waiting


class TakenByAnother(list):
    """Idle threads of which another thread takes the last one between any look and what follows it."""

    def __bool__(self) -> bool:
        return True


@pytest.fixture
def none_left() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_idle", TakenByAnother())
        yield


def test_a_wait_begins_where_another_one_takes_the_last_thread(none_left: None):
    with waiting.Waiting(lambda: True) as wait:
        assert wait.over(20.0)


class Clock:
    """Time passes in it while one sleeps."""

    def __init__(self) -> None:
        self.now, self.pauses = 1000.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append((self.now - 1000.0, seconds))
        self.now += seconds


def test_polling_adds_little_to_a_wait_however_long_that_is(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    looks = sum(1 for _ in waiting.polling(2.0))
    assert clock.now == pytest.approx(1002.0) and looks == len(clock.pauses) + 1
    for passed, pause in clock.pauses:
        assert pause <= max(0.0002, 0.05 * passed) * 1.001 and pause <= 0.05, (passed, pause)
    assert looks < 250
