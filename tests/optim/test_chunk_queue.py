"""The queue of a step's chunks holds while another thread looks at it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch

from zinf_fx.optim.chunk_queue import ChunkQueue
from zinf_fx.optim.chunks import OpenChunk
from zinf_fx.optim.partial_step import Progress


class Watched(deque):
    """Calls `then` behind each look, and when something was taken out."""

    def __init__(self, items: Iterable[object], then: Callable[[], object]) -> None:
        super().__init__(items)
        self._then = then

    def __len__(self) -> int:
        count = super().__len__()
        self._then()
        return count

    def popleft(self) -> object:
        first = super().popleft()
        self._then()
        return first


def queue_of(*loose: object) -> ChunkQueue:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    queue = ChunkQueue({}, Progress(optimizer), None, 1)
    queue._loose.extend(loose)
    return queue


def test_a_chunk_that_is_opened_while_somebody_looks_is_seen() -> None:
    queue = queue_of()

    def open_next() -> None:
        while deque.__len__(queue._unopened):
            deque.append(queue._opened, deque.popleft(queue._unopened))

    queue._opened, queue._unopened = Watched([], open_next), Watched(["chunk"], open_next)
    assert queue


def test_a_chunk_with_all_gradients_waits_for_no_room() -> None:
    queue = queue_of()
    queue._opened.append(OpenChunk(SimpleNamespace(slices=())))
    queue.memory.tiers.append(None)  # which would be asked for it
    assert queue.ready


def test_what_came_is_counted_once() -> None:
    """However many parameters come one by one before they fill a chunk."""
    looks: list[int] = []

    class Came:
        elements = property(lambda self: looks.append(1) or 1)

    queue = queue_of()
    queue.memory.elements = 100
    for number in range(99):
        queue.add(Came())
        assert not queue.fills_a_chunk and len(looks) == number + 1
    queue.add(Came())
    assert queue.fills_a_chunk
    queue.close()
    assert not queue.fills_a_chunk


def test_bytes_that_wait_are_those_that_came_and_did_not_go() -> None:
    progress = Progress(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    all_states = [SimpleNamespace(parameter=object(), gradient=None) for _ in range(3)]
    for number, states in enumerate(all_states[:2]):
        progress.hold(states.parameter, 10 + number)
    progress.finish({states.parameter: states for states in all_states[1:]}, ())
    assert progress.bytes_held == 10
    progress.end()
    assert progress.bytes_held == 0


def test_a_queue_is_not_empty_while_it_is_cut() -> None:
    queue = queue_of(SimpleNamespace(chunks=lambda elements: ["chunk"], elements=1))
    queue.memory.elements = 1
    were_unopened: list[bool] = []
    queue._loose = Watched(queue._loose, lambda: were_unopened.append(bool(queue._unopened)))
    queue.cut()
    assert were_unopened[-1] and not deque.__len__(queue._loose)
