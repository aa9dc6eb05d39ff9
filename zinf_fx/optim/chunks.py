"""Parameters are cut into chunks; a chunk's windows are opened ahead of its update (ZeRO-Infinity, section 5.2.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zinf_fx.adam import STATE_BYTES
from zinf_fx.plan.memory.accounting import CHUNKS_IN_MEMORY
from zinf_fx.plan.schedule import CHUNKS
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up

P = TypeVar("P")


@dataclass(frozen=True)
class Piece(Generic[P]):
    """`count` consecutive elements of `owner`, a parameter, from `start` on: a multiple of WINDOW_ALIGNMENT behind the
    first of a part that this rank updates. `last`: whether it updates none behind them."""

    owner: P
    start: int
    count: int
    last: bool

    @property
    def elements(self) -> slice:
        """Which they are."""
        return slice(self.start, self.start + self.count)


def all_of(whole: P, count: int) -> Piece[P]:
    """A piece that is the whole, of `count` elements."""
    return Piece(whole, 0, count, True)


def chunk_elements(chunk: int, bytes_per_element: int, tiers: Iterable[Tiers]) -> int:
    """Elements of a chunk whose fp32 weights take `chunk` bytes; fewer where a host arena has no room for its buffers,
    of `bytes_per_element`, CHUNKS_IN_MEMORY times, or a plan has fewer. A multiple of WINDOW_ALIGNMENT."""
    tiers = list(tiers)
    planned = [each.chunk_elements for each in tiers if each.chunk_elements is not None]
    room = min(each.host.capacity - each.host.in_use for each in tiers)
    elements = min(chunk // STATE_BYTES, *planned, room // max(CHUNKS_IN_MEMORY * bytes_per_element, 1))
    return max(elements // WINDOW_ALIGNMENT, 1) * WINDOW_ALIGNMENT


def charged(count: int) -> int:
    """What so many elements of a parameter are charged for in a chunk."""
    return round_up(max(count, 1), WINDOW_ALIGNMENT)


def cut(
    parameters: Iterable[tuple[P, Sequence[range]]], elements: int, whole: Callable[[P], bool] = lambda _: False
) -> Iterator[tuple[Piece[P], ...]]:
    """Pieces of `parameters`, in order, packed into chunks of at most `elements` elements. With each parameter come
    the parts of it that this rank updates. `whole`: whether it can't be cut.

    A small parameter is charged for WINDOW_ALIGNMENT elements, so that a chunk of many small ones is bounded too.
    Vectorised kernels treat the end of a tensor differently, so that pieces end where such a kernel would not care.
    """
    assert elements > 0 and elements % WINDOW_ALIGNMENT == 0, elements
    chunk: list[Piece[P]] = []
    room = elements
    for parameter, updated in parameters:
        for number, part in enumerate(updated, start=1):
            start, ends = part.start, False
            if chunk and len(part) > room and whole(parameter):
                yield tuple(chunk)
                chunk, room = [], elements
            while not ends:
                count = min(part.stop - start, room)
                ends = start + count == part.stop
                chunk.append(Piece(parameter, start, count, ends and number == len(updated)))
                start += count
                room -= charged(count)
                if not room:
                    yield tuple(chunk)
                    chunk, room = [], elements
    if chunk:
        yield tuple(chunk)


class Opened(Protocol):
    """A chunk whose windows are open."""

    def close(self) -> None: ...


@contextmanager
def in_turn(tiers: Iterable[Tiers], part: range) -> Iterator[None]:
    """Leases in the block are for the chunk that has this part of the room that is planned for chunks."""
    with ExitStack() as rooms:
        for each in tiers:
            rooms.enter_context(each.stepping(part))
        yield


def part_of(number: int, nbytes: int, behind: int = 0, count: int = CHUNKS) -> range:
    """The part of the planned room that chunk `number`, of at most `nbytes`, has: behind the first bytes, chunks take
    turns in `count` equal parts, so that each finds its part free."""
    first = behind + number % count * nbytes
    return range(first, first + nbytes)


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
