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
