"""How an optimizer's step is cut into chunks, and where these lie: one rule, for plans and for the steps that run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from zinf_fx.plan.schedule import CHUNKS
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up

P = TypeVar("P")

# Elements of a chunk that the CPU updates at a time: with their states they fit its cache, and PyTorch's overhead for
# an operation is small beside the operation.
AT_A_TIME = 1 << 20
# Elements of a chunk, at most, that the CPU's threads update at the same time, in pieces.
AT_ONCE = 8 * AT_A_TIME
# Chunks that a limited host arena must have room for: one to spare.
_CHUNKS_IN_MEMORY = CHUNKS + 1


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


def elements_of_chunk(most: int, bytes_per_element: int = 0, room: int | None = None) -> int:
    """Elements of a chunk: `most`, or fewer where memory is limited and has `room` for fewer of the chunks that are
    there at a time and one to spare, of so many bytes per element. A multiple of WINDOW_ALIGNMENT."""
    if room is not None:
        most = min(most, max(room, 0) // max(_CHUNKS_IN_MEMORY * bytes_per_element, 1))
    return max(most // WINDOW_ALIGNMENT, 1) * WINDOW_ALIGNMENT


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


def part_of(number: int, nbytes: int, behind: int = 0, count: int = CHUNKS) -> range:
    """The part of the planned room that chunk `number`, of at most `nbytes`, has: behind the first bytes, chunks take
    turns in `count` equal parts, so that each finds its part free."""
    first = behind + number % count * nbytes
    return range(first, first + nbytes)
