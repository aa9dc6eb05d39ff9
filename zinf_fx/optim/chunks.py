"""A chunk's windows are opened ahead of its update (ZeRO-Infinity, section 5.2.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

from zinf_fx.adam import STATE_BYTES
from zinf_fx.plan.chunks import elements_of_chunk
from zinf_fx.runtime.tensor.tiers import Tiers


def chunk_elements(chunk: int, bytes_per_element: int, tiers: Iterable[Tiers]) -> int:
    """Elements of a chunk whose fp32 weights take `chunk` bytes, or as many as a plan has: see `elements_of_chunk`."""
    tiers = list(tiers)
    planned = [each.chunk_elements for each in tiers if each.chunk_elements is not None]
    room = min(each.host.capacity - each.host.in_use for each in tiers)
    return elements_of_chunk(min([chunk // STATE_BYTES, *planned]), bytes_per_element, room)


class Opened(Protocol):
    """A chunk whose windows are open."""

    def close(self) -> None: ...


@contextmanager
def in_turn(tiers: Iterable[Tiers], part: range) -> Iterator[None]:
    """What is allocated in the block is for the chunk that has this part of the room that is planned for chunks."""
    with ExitStack() as rooms:
        for each in tiers:
            rooms.enter_context(each.stepping(part))
        yield


Chunk = TypeVar("Chunk")
O = TypeVar("O", bound=Opened)  # noqa: E741


def opened_ahead(chunks: Iterable[Chunk], open_chunk: Callable[[Chunk], O], ahead: int = 1) -> Iterator[O]:
    """`open_chunk` of each chunk, in order, called `ahead` chunks before the result is handed out.

    What was opened and not handed out is closed when the iteration ends early.
    """
    waiting: deque[O] = deque()
    try:
        for chunk in chunks:
            waiting.append(open_chunk(chunk))
            if len(waiting) > ahead:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for opened in waiting:
            opened.close()
