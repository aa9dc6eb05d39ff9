"""Elements flow from where they are to where they belong, in pieces: some are read while others are written."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zinf_fx.checkpoint.files import Files
from zinf_fx.checkpoint.manifest import SavedBox, SavedPiece, SavedTensor
from zinf_fx.checkpoint.models import check_has_values
from zinf_fx.errors import CheckpointError, DamagedCheckpointError, StoreError
from zinf_fx.interrupts import let_through
from zinf_fx.native.engine import READ, File, FileTicket, crc32c_at
from zinf_fx.optim.elements import open_window
from zinf_fx.plan.intervals import merged
from zinf_fx.runtime.memory.buffers import aligned_empty
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.tensor.boxes import Box, copy_common, view_of
from zinf_fx.runtime.tensor.gathered import gathered
from zinf_fx.runtime.tensor.home import Home
from zinf_fx.runtime.tensor.local_parameter import local_part
from zinf_fx.runtime.tensor.quantised import bytes_of
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.runtime.tensor.windows import Window
from zinf_fx.sizes import PAGE, PIECE, blocks, pieces_of


class OrdinaryElements:
    """The part of a `Window` that is used here, over elements of an ordinary tensor: in its own memory if that is
    contiguous and the CPU's, and has the values as they are, else in a copy."""

    ready = True

    def __init__(self, tensor: torch.Tensor, elements: range, *, load: bool) -> None:
        self._tensor, self._elements = tensor.detach(), elements
        as_they_are = not tensor.is_conj() and not tensor.is_neg()
        self._in_place = tensor.device.type == "cpu" and tensor.is_contiguous() and as_they_are
        if self._in_place:
            flat = self._tensor.as_strided((self._tensor.numel(),), (1,))  # `view` keeps the stride of one element
            self._memory = flat[elements.start : elements.stop]
        else:
            self._memory = torch.empty(len(elements), dtype=tensor.dtype, device="cpu")
            if load:
                self._move(load=True)

    def wait(self) -> torch.Tensor:
        """The elements, 1-D."""
        return self._memory

    def store(self) -> None:
        """Write them back."""
        if not self._in_place:
            self._move(load=False)

    def close(self) -> None:
        """Nothing to give back."""

    def _move(self, load: bool) -> None:
        whole = Box.whole(self._tensor.shape)
        for part in whole.boxes_of(self._elements):
            theirs = self._tensor
            for dim, (start, size) in enumerate(zip(part.offsets, part.shape, strict=True)):
                theirs = theirs.narrow(dim, start, size)
            mine = view_of(self._memory, whole, self._elements.start, part)
            mine.copy_(theirs) if load else theirs.copy_(mine)


@dataclass(frozen=True, eq=False)
class Holding:
    """What this rank has of a tensor. Of a quantised one, the tensor is that of its bytes: what is loaded is what was
    saved.

    Attributes:
        tensor: this rank's part, stored or not; `box`: which elements of the whole tensor it is.
        shape: of the whole tensor.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box

    @classmethod
    def of(cls, tensor: torch.Tensor, what: str) -> Holding:
        """Of any tensor. Raises: CheckpointError for one without values, or of a class of its own."""
        local = local_part(tensor)
        if isinstance(local, StoredTensor) and local.quantised is not None:
            tensor = local = bytes_of(local)
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                raise CheckpointError(
                    f"{what} is a DTensor that is not reduced yet: redistribute it before it is saved"
                )
            shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            box = Box(tuple(offsets), tuple(shape))
        else:
            box = Box.whole(tensor.shape)
        if isinstance(local, StoredTensor):
            local = local.full_tensor() if local.views else local
        elif type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise CheckpointError(
                f"{what} is a {type(local).__qualname__}, whose bytes say nothing without its class: save what it was "
                "made of by your own means"
            )
        check_has_values(local, what)
        return cls(local, tuple(tensor.shape), box)

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.tensor.dtype

    @property
    def is_ordinary(self) -> bool:
        """Whether it is in memory: every rank may have another one."""
        return not isinstance(self.tensor, StoredTensor)

    @property
    def identity(self) -> tuple:
        """What two names of one tensor have in common."""
        if isinstance(self.tensor, StoredTensor):
            return (self.tensor.storage.key,)
        place = self.tensor.untyped_storage().data_ptr(), self.tensor.storage_offset(), self.tensor.stride()
        what = self.shape, self.dtype, self.tensor.is_conj(), self.tensor.is_neg()
        return (id(self.tensor),) if not self.tensor.numel() else (*place, *what)

    @property
    def tiers(self) -> Tiers | None:
        """Those of a stored tensor."""
        return self.tensor.storage.usable_tiers() if isinstance(self.tensor, StoredTensor) else None

    @property
    def home(self) -> Home | None:
        """Where a stored tensor lives."""
        return self.tensor.storage.bytes.home if isinstance(self.tensor, StoredTensor) else None

    @property
    def own(self) -> list[range]:
        """The elements, by number in the box, that this rank is to save, if others have the rest."""
        parts = (range(self.box.numel),)
        if isinstance(self.tensor, StoredTensor) and not self.tensor.storage.share.unreduced:
            parts = self.tensor.storage.share.own
        return [part for part in parts if part]

    @property
    def held(self) -> list[range]:
        """The elements that are to be loaded here."""
        if isinstance(self.tensor, StoredTensor) and self.tensor.storage.share.partitioned:
            return self.own
        return [range(self.box.numel)] if self.box.numel else []

    def chunks(self, elements: range, nbytes: int = PIECE) -> list[range]:
        """Consecutive elements, in parts of at most `nbytes` that are read or written at a time: no more than the
        optimizer's step does."""
        tiers = self.tiers
        if tiers is not None:
            planned = None if tiers.chunk_elements is None else tiers.chunk_elements * self.dtype.itemsize
            nbytes = min(nbytes, self.tensor.storage.config.chunk, planned or nbytes)
        return pieces_of(elements, self.dtype.itemsize, nbytes)

    def in_home(self, elements: range) -> range:
        """The bytes of their home that consecutive elements of a stored tensor are."""
        storage, itemsize = self.tensor.storage, self.dtype.itemsize
        first = (storage.bytes.first + storage.share.position(elements.start)) * itemsize
        return range(first, first + len(elements) * itemsize)

    def in_pages(self, elements: range) -> range | None:
        """The same, if they begin with a page of the store."""
        if (home := self.home) is None or home.in_store is None:
            return None
        found = self.in_home(elements)
        return None if found.start % PAGE or PAGE % self.dtype.itemsize else found

    def checksum(self, elements: range) -> int | None:
        """The CRC-32C of consecutive elements that are whole pages of the store, and not being written; else None."""
        place = self.in_pages(elements)
        return self.home.in_store.checksum(place.start, len(place)) if place and len(place) % PAGE == 0 else None

    def open_for_reading(self, elements: range) -> Window | OrdinaryElements:
        """A window in host memory over some elements of one range. Their read starts now."""
        return self._open(elements, load=True)

    def open_for_writing(self, elements: range) -> Window | OrdinaryElements:
        """The same, over elements that are all to be set, and stored then; few others are on their way to the store."""
        if (tiers := self.tiers) is not None:
            tiers.limit_writes(PIECE)
        return self._open(elements, load=False)

    def _open(self, elements: range, *, load: bool) -> Window | OrdinaryElements:
        if isinstance(self.tensor, StoredTensor):
            return open_window(self.tensor.storage, CPU, elements.start, len(elements), load=load)
        return OrdinaryElements(self.tensor, elements, load=load)

    def loaded(self) -> None:
        """All elements that are held were written."""
        if isinstance(self.tensor, StoredTensor):
            self.tensor.storage.share.stale = False


@dataclass(frozen=True)
class SavedRun:
    """Consecutive elements of a rank's part of a tensor, which it is to save."""

    name: str
    holding: Holding
    elements: range

    @property
    def nbytes(self) -> int:
        """Of the elements."""
        return len(self.elements) * self.holding.dtype.itemsize


@dataclass(frozen=True)
class PlaceInFile:
    """Where some elements of a run are to be: the number of the file, and the offset in it."""

    run: SavedRun
    elements: range
    file: int
    offset: int

    @cached_property
    def nbytes(self) -> int:
        """Of the elements."""
        return len(self.elements) * self.run.holding.dtype.itemsize


IN_FLIGHT = 32 << 20
"""Bytes that are under way at a time in one direction, about."""

T = TypeVar("T")


class UnderWay(Generic[T]):
    """Things in a row, each with its bytes."""

    def __init__(self, most: int = IN_FLIGHT) -> None:
        """`most`: bytes that may be under way at a time, if that is more than one thing."""
        self._most = most
        self._things: deque[tuple[T, int]] = deque()
        self._nbytes = 0

    def add(self, thing: T, nbytes: int) -> None:
        """One more comes last."""
        self._things.append((thing, nbytes))
        self._nbytes += nbytes

    @property
    def first(self) -> T:
        """What came first."""
        return self._things[0][0]

    def end_first(self) -> None:
        """What came first is over."""
        self._nbytes -= self._things.popleft()[1]

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more may be under way."""
        return not self._things or self._nbytes + nbytes <= self._most

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[T]:
        return (thing for thing, _ in self._things)

    def clear(self) -> None:
        """All are over."""
        self._things.clear()
        self._nbytes = 0


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


class _Piece(NamedTuple):
    """A piece under way: the window over its elements, and what writes them."""

    place: PlaceInFile
    window: Window | OrdinaryElements
    ticket: FileTicket | None = None


class Writer:
    """Writes pieces to data files."""

    def __init__(
        self, files: Files, opened: Sequence[File], report: Callable[[int], object], in_flight: int = IN_FLIGHT
    ) -> None:
        """`report` is told of bytes that were written; `in_flight`: bytes that are being written at a time. Twice as
        many are being read: a read has arrived when the checksums of its pages were compared, too."""
        self._files, self._opened, self._report = files, opened, report
        self._reading: UnderWay[_Piece] = UnderWay(2 * in_flight)
        self._writing: UnderWay[_Piece] = UnderWay(in_flight)
        self._sums: list[int] = []

    def write(self, headers: Sequence[bytes], places: Sequence[PlaceInFile]) -> list[int]:
        """Write the headers of the files and all pieces. Returns the checksum of each piece.

        Raises: StoreError; some is written then.
        """
        self._sums = []
        try:
            begun = -1
            for place in places:
                let_through()
                if place.file != begun:
                    begun = place.file
                    self._begin(self._opened[begun], headers[begun])
                while not self._reading.has_room(place.nbytes):
                    self._write_first()
                self._reading.add(_Piece(place, self._open(place)), place.nbytes)
            while self._reading:
                self._write_first()
            while self._writing:
                self._end_first()
        except BaseException:
            self._give_up()
            raise
        return self._sums

    def _begin(self, file: File, header: bytes) -> None:
        memory = aligned_empty(len(header))
        memory[:] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._files.start_write(file, memory.data_ptr(), 0, len(header), memory).wait()

    def _open(self, place: PlaceInFile) -> Window | OrdinaryElements:
        """A window, for which there may be room only when those that are open are gone."""
        while True:
            try:
                return place.run.holding.open_for_reading(place.elements)
            except StoreError:
                if self._writing:
                    self._end_first()
                elif self._reading:
                    self._write_first()
                else:
                    raise

    def _write_first(self) -> None:
        place, window, _ = self._reading.first
        memory = window.wait()
        known = place.run.holding.checksum(place.elements)
        self._sums.append(crc32c_at(memory.data_ptr(), place.nbytes) if known is None else known)
        if memory.data_ptr() % PAGE or place.nbytes % PAGE:
            memory = _in_pages(memory, place.nbytes)
        while not self._writing.has_room(place.nbytes):
            self._end_first()
        file, nbytes = self._opened[place.file], blocks(place.nbytes)
        ticket = self._files.start_write(file, memory.data_ptr(), place.offset, nbytes, memory)
        self._writing.add(_Piece(place, window, ticket), place.nbytes)
        self._reading.end_first()

    def _end_first(self) -> None:
        place, window, ticket = self._writing.first
        ticket.wait()
        self._writing.end_first()
        window.close()
        self._report(place.nbytes)

    def _give_up(self) -> None:
        """Give back the windows, once nothing is written from them."""
        for piece in (*self._writing, *self._reading):
            if piece.ticket is not None:
                _ended(piece.ticket)
            piece.window.close()
        self._writing.clear()
        self._reading.clear()


def _ended(ticket: FileTicket) -> None:
    """Wait for a transfer that may fail: another failure is on its way to the caller."""
    try:
        ticket.wait()
    except StoreError:
        return


def _in_pages(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A copy in whole pages, with zeros behind the bytes."""
    pages = aligned_empty(nbytes)
    pages[:nbytes] = memory.contiguous().view(torch.uint8)
    pages[nbytes:] = 0
    return pages


@torch.no_grad()
def values_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """All elements of a tensor in order, flat, on the CPU; each piece is valid until the next is asked for.

    Of a tensor that several ranks have parts of, every rank asks for all pieces, and gets the same.
    """
    if isinstance(tensor, StoredTensor) and not tensor.views:
        storage, share = tensor.storage, tensor.storage.share
        if share.in_shares:
            share.ranks.meet(f"the gather of {storage.name}")
        held = storage.refreshed()
        yield from _of_all_ranks(storage, held) if share.partitioned else _in_windows(held)
        return
    with gathered(tensor) as value:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        yield value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)


def _in_windows(held: StoredBytes) -> Iterator[torch.Tensor]:
    """All elements, in order: the next piece is on its way while one is looked at."""
    parts = pieces_of(range(held.count), held.dtype.itemsize)
    windows = [held.window(part.start, len(part)) for part in parts[:1]]
    try:
        for number in range(len(parts)):
            if number + 1 < len(parts):
                ahead = parts[number + 1]
                windows.append(held.window(ahead.start, len(ahead)))
            yield windows[0].wait()
            windows.pop(0).close()
    finally:
        for window in windows:
            window.close()


def _of_all_ranks(storage: TensorStorage, held: StoredBytes) -> Iterator[torch.Tensor]:
    """All elements, in order: each rank sends the pieces of its parts to the others."""
    share = storage.share
    parts = [(rank, segment.of_rank(rank)) for segment in share.shards.segments for rank in range(share.ranks.shards)]
    for rank, part in ((rank, part) for rank, whole in parts for part in pieces_of(whole, storage.dtype.itemsize)):
        full = torch.empty(len(part), dtype=storage.dtype, device=storage.device.torch_device)
        window = held.device_window(share.position(part.start), len(part)) if rank == share.ranks.shard else None
        try:
            own = full if window is None else window.wait()
            share.ranks.all_gather(full, own, storage.name, owner=rank).wait()
        finally:
            if window is not None:
                window.close()
        yield full.cpu()


# Bytes that may be on their way to the disk, of a value that is replaced, before its next piece follows.
_IN_FLIGHT = 64 << 20


@torch.no_grad()
def replace(storage: TensorStorage, value: torch.Tensor, after_piece: Callable[[], None] | None = None) -> None:
    """As `TensorStorage.set`; to a disk piece by piece, so that not all of the value is in memory once more.
    `after_piece` is called after each."""
    if storage.tier != "nvme":
        storage.set(value)
        return
    held, elements = storage.settled(), storage.share.cut(value).reshape(-1)
    for part in pieces_of(range(held.count), held.dtype.itemsize):
        window = held.window(part.start, len(part), load=False)
        try:
            copy = held.device.download(elements[part.start : part.stop], window.wait())
        except BaseException:
            window.close()
            raise
        window.store(after=copy)
        held.tiers.limit_writes(_IN_FLIGHT)
        if after_piece is not None:
            after_piece()
    storage.share.stale = False
