"""Opening runs ahead, in order, and cleans up."""

from __future__ import annotations

import pytest

from zinf_fx.optim.gradients import opened_ahead


class Chunk:
    def __init__(self, name: int, log: list[str]) -> None:
        self.name, self.log = name, log
        log.append(f"open {name}")

    def close(self) -> None:
        self.log.append(f"close {self.name}")


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_opened_ahead(ahead: int):
    log: list[str] = []
    for chunk in opened_ahead(range(5), lambda name: Chunk(name, log), ahead):
        log.append(f"use {chunk.name}")
    assert [line for line in log if line.startswith("use")] == [f"use {k}" for k in range(5)]
    for k in range(5 - ahead):
        assert log.index(f"use {k}") == log.index(f"open {k + ahead}") + 1


def test_what_was_opened_ahead_is_closed():
    log: list[str] = []
    chunks = opened_ahead(range(5), lambda name: Chunk(name, log), 2)
    next(chunks)
    chunks.close()
    assert log == ["open 0", "open 1", "open 2", "close 1", "close 2"]
