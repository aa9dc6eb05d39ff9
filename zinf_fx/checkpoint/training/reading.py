"""Pieces flow from data files to where tensors live: some are read while others are checked and copied."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from zinf_fx.checkpoint.training.manifest import SavedBox, SavedPiece, SavedTensor
from zinf_fx.checkpoint.training.under_way import IN_FLIGHT, UnderWay
from zinf_fx.errors import DamagedCheckpointError
from zinf_fx.interrupts import let_through
from zinf_fx.native.engine import READ, File, crc32c_at
from zinf_fx.plan.intervals import merged
from zinf_fx.runtime.memory.buffers import aligned_empty
from zinf_fx.runtime.tensor.boxes import Box, copy_common
from zinf_fx.sizes import PAGE, blocks

T = TypeVar("T")


class PieceMemory:
    """What pieces are read into: that of one that is gone is there for the next, and not given back and taken anew, as
    far as all that is free is no more than what may be under way."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}  # by their sizes in bytes
        self._nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes, in whole pages."""
        size = max(1 << (nbytes - 1).bit_length(), PAGE)
        free = self._free.get(size)
        if not free:
            return aligned_empty(size)
        self._nbytes -= size
        return free.pop()

    def give(self, memory: torch.Tensor) -> None:
        """Nobody uses what was taken any more."""
        self._nbytes += memory.numel()
        if self._nbytes > IN_FLIGHT:  # of sizes that other tensors had
            self._free, self._nbytes = {}, memory.numel()
        self._free.setdefault(memory.numel(), []).append(memory)


class Reading:
    """A piece that is being read, and its elements when they are there and have the right checksum.

    Attributes:
        nbytes: of the elements.
        pages: that they are in: the address in memory, how many bytes, and the offset in the file.
    """

    def __init__(self, file: File, tensor: SavedTensor, piece: SavedPiece, memory: PieceMemory) -> None:
        self.piece, self._tensor, self._file = piece, tensor, file
        self.nbytes = piece.count * tensor.dtype.itemsize
        first = piece.offset // PAGE * PAGE
        length = blocks(piece.offset + self.nbytes + piece.padding - first)
        self._room, self._memory = memory, memory.take(length)
        self._skip = piece.offset - first
        self.pages = self._memory.data_ptr(), length, first
        self._ticket = file.submit(READ, self._memory.data_ptr(), first, length, self._memory)
        self._elements: torch.Tensor | None = None

    def __del__(self) -> None:
        ticket = getattr(self, "_ticket", None)
        if ticket is not None and ticket.done():
            self._room.give(self._memory)

    def wait(self) -> torch.Tensor:
        """The elements, flat. Raises: CheckpointError for other bytes than were saved; StoreError."""
        if self._elements is None:
            self._ticket.wait()
            summed = self.nbytes + self.piece.padding
            if crc32c_at(self._memory.data_ptr() + self._skip, summed) != self.piece.crc32c:
                raise DamagedCheckpointError(
                    f"{self._file.path} is damaged: the {self.nbytes} bytes at offset {self.piece.offset}, of "
                    f"'{self._tensor.name}', have another checksum than when they were saved; use another checkpoint"
                )
            content = self._memory[self._skip : self._skip + self.nbytes]
            if self._skip % self._tensor.dtype.itemsize:
                content = content.clone()
            self._elements = content.view(self._tensor.dtype)
        return self._elements


def readings(
    opened: Sequence[File], pieces: Iterable[tuple[SavedTensor, SavedPiece, T]]
) -> Iterator[tuple[Reading, T]]:
    """The readings of pieces, in order, each with what else is said of its piece; the next ones are under way, too."""
    memory, queue = PieceMemory(), UnderWay[tuple[Reading, T]]()
    for saved, piece, what in pieces:
        let_through()
        nbytes = piece.count * saved.dtype.itemsize + piece.padding
        while not queue.has_room(nbytes):
            yield queue.first
            queue.end_first()
        queue.add((Reading(opened[piece.file], saved, piece, memory), what), nbytes)
    while queue:
        yield queue.first
        queue.end_first()


class Destination(Protocol):
    """Memory for some elements, 1-D: wait, set them all, then `store` or `close`, once."""

    def wait(self) -> torch.Tensor:
        """The memory."""

    def store(self) -> None:
        """Send the elements to where they belong."""

    def close(self) -> None:
        """Give the memory back."""


class Target(Protocol):
    """What elements of a tensor are read into: see `Holding`."""

    @property
    def box(self) -> Box:
        """Which elements of the tensor there are here."""

    @property
    def held(self) -> list[range]:
        """Those that are wanted."""

    def chunks(self, elements: range) -> list[range]:
        """Some of them, in parts that are read at a time."""

    def open_for_writing(self, elements: range) -> Destination:
        """Memory for a part. The parts come in order."""


@dataclass(eq=False)
class _Chunk:
    """Elements that are wanted somewhere, and how many of the pieces that they are made of are still to come."""

    target: Target
    elements: range
    left: int


class Reader:
    """Reads pieces from data files, each once as far as neighbours need it."""

    def __init__(self, opened: Sequence[File], report: Callable[[int], object]) -> None:
        """`report` is told of bytes that are where they belong."""
        self._opened, self._report, self._memory = opened, report, PieceMemory()
        self._known: weakref.WeakValueDictionary[tuple[int, int], Reading] = weakref.WeakValueDictionary()
        self._queue: UnderWay[tuple[_Chunk, Box, Reading]] = UnderWay()
        self._window: Destination | None = None  # over the chunk that comes first

    def read(self, saved: SavedTensor, target: Target) -> None:
        """Start to fill a target; it is full when `end` has returned."""
        for elements in (part for held in target.held for part in target.chunks(held)):
            let_through()
            needed = list(needed_for(saved, target.box, elements))
            chunk = _Chunk(target, elements, len(needed))
            for box, piece in needed:
                nbytes = piece.count * saved.dtype.itemsize
                while not self._queue.has_room(nbytes):
                    self._take_first()
                self._queue.add((chunk, box, self._start(saved, piece)), nbytes)

    def end(self) -> None:
        """Wait until all is filled. Raises: CheckpointError, StoreError."""
        while self._queue:
            self._take_first()

    def close(self) -> None:
        """Give back what is open."""
        if self._window is not None:
            self._window.close()
            self._window = None
        self._queue.clear()

    def _start(self, saved: SavedTensor, piece: SavedPiece) -> Reading:
        place = piece.file, piece.offset
        reading = self._known.get(place)
        if reading is None:
            reading = self._known[place] = Reading(self._opened[piece.file], saved, piece, self._memory)
        return reading

    def _take_first(self) -> None:
        chunk, box, reading = self._queue.first
        source = reading.wait()
        if self._window is None:
            self._window = chunk.target.open_for_writing(chunk.elements)
        copy_common(self._window.wait(), chunk.target.box, chunk.elements, source, box, reading.piece.elements)
        self._queue.end_first()
        chunk.left -= 1
        if not chunk.left:
            window, self._window = self._window, None
            window.store()
            self._report(len(chunk.elements) * source.dtype.itemsize)


def needed_for(saved: SavedTensor, box: Box, elements: range) -> Iterator[tuple[Box, SavedPiece]]:
    """The pieces that have any of some elements of a box, each with the box that it is of."""
    for one in saved.boxes:
        for piece in _pieces_for(one, box, elements):
            yield one.box, piece


def _pieces_for(source: SavedBox, box: Box, elements: range) -> Iterator[SavedPiece]:
    other, wanted = source.box, [elements]
    if other != box:
        wanted = [other.hull(shared) for part in box.boxes_of(elements) if (shared := part.within(other)) is not None]
    for numbers in merged(_numbers_with(source.pieces, one) for one in wanted):
        yield from source.pieces[numbers.start : numbers.stop]


def _numbers_with(pieces: Sequence[SavedPiece], elements: range) -> range:
    """Which of the pieces of a box have any of these elements. A sound manifest has them in order, without gaps: of a
    large tensor there are many, which are searched for every chunk that is read."""
    first = bisect_right(pieces, elements.start, key=_start) - 1
    return range(max(first, 0), bisect_left(pieces, elements.stop, key=_start))


def _start(piece: SavedPiece) -> int:
    return piece.start
