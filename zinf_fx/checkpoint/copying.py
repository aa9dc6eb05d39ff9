"""Elements flow from where they are to where they belong, in pieces: some are read while others are written."""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zinf_fx.checkpoint.manifest import SavedPiece, SavedTensor
from zinf_fx.checkpoint.models import check_has_values
from zinf_fx.errors import CheckpointError, DamagedCheckpointError, StoreError
from zinf_fx.interrupts import let_through
from zinf_fx.native.engine import READ, File, crc32c_at
from zinf_fx.optim.elements import open_window
from zinf_fx.plan.intervals import merged
from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.gradients.state import GradientState, state_of
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.runtime.memory.transfers import Ticket
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.boxes import Box, copy_common, view_of
from zinf_fx.runtime.tensor.gathered import gathered
from zinf_fx.runtime.tensor.local_parameter import local_part
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor, bytes_of
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window
from zinf_fx.sizes import PAGE, PIECE, blocks, pieces_of


class Read:
    """Elements in memory, once the transfer that fills it is done: `wait`, use, then `close`."""

    def __init__(self, memory: torch.Tensor, ticket: Ticket | None = None) -> None:
        """`memory`: the elements, 1-D; without a ticket, they are there."""
        self._memory: torch.Tensor | None = memory
        self._ticket = ticket

    def wait(self) -> torch.Tensor:
        """The elements, 1-D. Raises: StoreError."""
        if self._ticket is not None:
            self._ticket.wait()
        assert self._memory is not None
        return self._memory

    def close(self) -> None:
        """Give the memory back. A read that is under way is waited for, whether it ends well or not."""
        if self._ticket is not None:
            with contextlib.suppress(StoreError):
                self._ticket.wait()
        self._memory = None


@dataclass(frozen=True, eq=False)
class TensorShard:
    """This rank's shard of a tensor. The shard of a quantised tensor has its bytes: what is loaded is what was saved.

    Attributes:
        tensor: the shard itself, stored or not.
        shape: the shape of the whole tensor; `box`: which elements of it the shard has.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box

    @classmethod
    def of(cls, tensor: torch.Tensor, what: str) -> TensorShard:
        """Return the shard of any tensor. Raises: CheckpointError for one without values, or of a class of its own."""
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
        """The dtype of the elements."""
        return self.tensor.dtype

    @property
    def is_in_memory(self) -> bool:
        """Whether it is an ordinary tensor: every rank may have another one."""
        return not isinstance(self.tensor, StoredTensor)

    @property
    def identity(self) -> tuple:
        """A key that two names of one tensor have in common."""
        if isinstance(self.tensor, StoredTensor):
            return (self.tensor.stored.key,)
        place = self.tensor.untyped_storage().data_ptr(), self.tensor.storage_offset(), self.tensor.stride()
        what = self.shape, self.dtype, self.tensor.is_conj(), self.tensor.is_neg()
        return (id(self.tensor),) if not self.tensor.numel() else (*place, *what)

    @property
    def stored(self) -> TensorStorage:
        """Return the storage of a stored tensor."""
        assert isinstance(self.tensor, StoredTensor)
        return self.tensor.stored

    @property
    def copy_on_write(self) -> CopyOnWrite:
        """Where a tensor lives whose bytes are in the store, and are this training's."""
        allocation = self.allocation
        assert allocation is not None and isinstance(allocation.in_store, CopyOnWrite)
        return allocation.in_store

    @property
    def tiers(self) -> Tiers | None:
        """The tiers of a stored tensor."""
        return self.tensor.stored.tiers if isinstance(self.tensor, StoredTensor) else None

    @property
    def allocation(self) -> Allocation | None:
        """Where a stored tensor lives."""
        return self.tensor.stored.bytes.allocation if isinstance(self.tensor, StoredTensor) else None

    @property
    def owned(self) -> list[range]:
        """The elements, by number in the box, that this rank saves, if others have the rest."""
        parts = (range(self.box.numel),)
        if isinstance(self.tensor, StoredTensor) and state_of(self.tensor) is not GradientState.LOCAL:
            parts = self.tensor.stored.shard.own
        return [part for part in parts if part]

    @property
    def wanted(self) -> list[range]:
        """The elements that are loaded here."""
        if isinstance(self.tensor, StoredTensor) and self.tensor.stored.shard.partitioned:
            return self.owned
        return [range(self.box.numel)] if self.box.numel else []

    def chunks(self, elements: range, nbytes: int = PIECE) -> list[range]:
        """Divide consecutive elements into parts that are read or written at a time: at most `nbytes`, and no more than
        the optimizer's step does."""
        tiers = self.tiers
        if tiers is not None:
            planned = None if tiers.chunk_elements is None else tiers.chunk_elements * self.dtype.itemsize
            nbytes = min(nbytes, self.stored.config.chunk, planned or nbytes)
        return pieces_of(elements, self.dtype.itemsize, nbytes)

    def byte_range(self, elements: range) -> range:
        """Return which bytes of their allocation consecutive elements of a stored tensor are."""
        storage, itemsize = self.stored, self.dtype.itemsize
        first = (storage.bytes.elements.start + storage.shard.position(elements.start)) * itemsize
        return range(first, first + len(elements) * itemsize)

    def page_range(self, elements: range) -> range | None:
        """Return the same bytes, if they begin with a page of the store; else None."""
        if (allocation := self.allocation) is None or allocation.in_store is None:
            return None
        nbytes = self.byte_range(elements)
        return None if nbytes.start % PAGE or PAGE % self.dtype.itemsize else nbytes

    def checksum(self, elements: range) -> int | None:
        """Return the CRC-32C of elements that are whole pages of the store, and not being written; else None."""
        place, allocation = self.page_range(elements), self.allocation
        if not place or len(place) % PAGE or allocation is None or allocation.in_store is None:
            return None
        return allocation.in_store.checksum(place.start, len(place))

    def read(self, elements: range) -> Window | DeviceWindow | Read:
        """Start to read consecutive elements of one range to host memory. What is there already is used in place."""
        if isinstance(self.tensor, StoredTensor):
            return open_window(self.tensor.stored, CPU, elements.start, len(elements))
        if (there := self._in_place()) is not None:
            return Read(there[elements.start : elements.stop])
        memory = torch.empty(len(elements), dtype=self.dtype, device="cpu")
        for theirs, mine in self._in_boxes(elements, memory):
            mine.copy_(theirs)
        return Read(memory)

    @contextmanager
    def overwritten(self, elements: range) -> Iterator[torch.Tensor]:
        """Give memory for consecutive elements, all of which the block sets. They are sent to where the tensor lives
        then; few others are on their way to the store."""
        if isinstance(self.tensor, StoredTensor):
            self.stored.tiers.limit_writes(PIECE)
            window = open_window(self.tensor.stored, CPU, elements.start, len(elements), load=False)
            try:
                yield window.wait()
                window.store()
            finally:
                window.close()
        elif (there := self._in_place()) is not None:
            yield there[elements.start : elements.stop]
        else:
            memory = torch.empty(len(elements), dtype=self.dtype, device="cpu")
            yield memory
            for theirs, mine in self._in_boxes(elements, memory):
                theirs.copy_(mine)

    def _in_place(self) -> torch.Tensor | None:
        """Return all elements of an ordinary tensor, 1-D, if the host's memory has them as they are."""
        tensor = self.tensor.detach()
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        return tensor.as_strided((tensor.numel(),), (1,))  # `view` keeps the stride of one element

    def _in_boxes(self, elements: range, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Give parts of consecutive elements that are boxes, of an ordinary tensor and of `memory`, which is flat."""
        whole = Box.whole(self.tensor.shape)
        for part in whole.boxes_of(elements):
            theirs = self.tensor.detach()
            for dim, (start, size) in enumerate(zip(part.offsets, part.shape, strict=True)):
                theirs = theirs.narrow(dim, start, size)
            yield theirs, view_of(memory, whole, elements.start, part)

    def mark_loaded(self) -> None:
        """Note that all elements that are wanted here were written."""
        if isinstance(self.tensor, StoredTensor):
            self.tensor.stored.shard.stale = False


@dataclass(frozen=True)
class ShardRange:
    """Consecutive elements of a shard, under the name of its tensor."""

    name: str
    shard: TensorShard
    elements: range

    @property
    def nbytes(self) -> int:
        """The size of the elements."""
        return len(self.elements) * self.shard.dtype.itemsize

    def in_chunks(self) -> list[ShardRange]:
        """Divide it as `TensorShard.chunks` does."""
        return [ShardRange(self.name, self.shard, elements) for elements in self.shard.chunks(self.elements)]


IN_FLIGHT = 32 << 20
"""Bytes that are under way at a time in one direction, about."""

R = TypeVar("R", bound="Window | DeviceWindow | Read | FileRead")
T = TypeVar("T")


class Transfer(NamedTuple, Generic[R, T]):
    """Elements that are to be read: how many bytes, what starts their read, and what they are."""

    nbytes: int
    start: Callable[[], R]
    what: T


class _Queue(Generic[T]):
    """Transfers under way, in their order, each with its bytes; `most` bytes at a time, or one transfer."""

    def __init__(self, most: int) -> None:
        self._most, self._nbytes = most, 0
        self.transfers: deque[tuple[T, int]] = deque()

    def add(self, transfer: T, nbytes: int) -> None:
        self.transfers.append((transfer, nbytes))
        self._nbytes += nbytes

    def end_first(self) -> None:
        self._nbytes -= self.transfers.popleft()[1]

    def has_room(self, nbytes: int) -> bool:
        return not self.transfers or self._nbytes + nbytes <= self._most


def read_ahead(
    transfers: Iterable[Transfer[R, T]], most: int = IN_FLIGHT, make_room: Callable[[], bool] = lambda: False
) -> Generator[tuple[R, T], None, None]:
    """Start reads in their order, and give each as the first of those that are under way, with what it is.

    `most`: bytes that are under way at a time, if that is more than one read. `make_room` is called where a read finds
    no memory and none is under way; it says whether there is more now. Who takes a read closes it; those that nobody
    took are closed in the end.
    """
    queue: _Queue[tuple[R, T]] = _Queue(most)
    try:
        for transfer in transfers:
            let_through()
            while not queue.has_room(transfer.nbytes):
                yield queue.transfers[0][0]
                queue.end_first()
            while True:
                try:
                    read = transfer.start()
                    break
                except StoreError:
                    if make_room():
                        continue
                    if not queue.transfers:
                        raise
                    yield queue.transfers[0][0]
                    queue.end_first()
            queue.add((read, transfer.what), transfer.nbytes)
        while queue.transfers:
            yield queue.transfers[0][0]
            queue.end_first()
    finally:
        for (read, _), _ in queue.transfers:
            read.close()


def copy(
    transfers: Iterable[Transfer[Window | DeviceWindow | Read, T]],
    write: Callable[[torch.Tensor, T], Ticket],
    report: Callable[[int], object],
    in_flight: int = IN_FLIGHT,
) -> None:
    """Copy elements in pieces, in their order: while some are written, the next ones are read.

    `write` starts to write what was read. `report` is told of bytes that were written; `in_flight`: bytes that are
    being written at a time. Twice as many are being read: a read has arrived when the checksums of its pages were
    compared, too.

    Raises: StoreError; some is written then.
    """
    writes: _Queue[tuple[Window | DeviceWindow | Read, Ticket]] = _Queue(in_flight)

    def end_first() -> bool:
        if not writes.transfers:
            return False
        (read, ticket), nbytes = writes.transfers[0]
        ticket.wait()
        writes.end_first()
        read.close()
        report(nbytes)
        return True

    with closing(read_ahead(transfers, 2 * in_flight, end_first)) as reads:
        try:
            for read, what in reads:
                elements = read.wait()
                while not writes.has_room(elements.nbytes):
                    end_first()
                writes.add((read, write(elements, what)), elements.nbytes)
            while end_first():
                pass
        finally:  # nothing is written any more from what is given back
            for (read, ticket), _ in writes.transfers:
                with contextlib.suppress(StoreError):
                    ticket.wait()
                read.close()


class PieceMemory:
    """Memory that pieces are read into. That of a piece that is gone serves the next one, as far as no more is free
    than may be under way."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}  # by their sizes in bytes
        self._nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory of at least so many bytes, in whole pages."""
        size = max(1 << (nbytes - 1).bit_length(), PAGE)
        free = self._free.get(size)
        if not free:
            return aligned_empty(size)
        self._nbytes -= size
        return free.pop()

    def give(self, memory: torch.Tensor) -> None:
        """Give back what was taken."""
        self._nbytes += memory.numel()
        if self._nbytes > IN_FLIGHT:  # of sizes that other tensors had
            self._free, self._nbytes = {}, memory.numel()
        self._free.setdefault(memory.numel(), []).append(memory)


class FileRead:
    """A piece that is being read, and its elements when they are there and have the right checksum.

    Attributes:
        nbytes: the size of the elements.
        pages: the pages that they are in: the address in memory, how many bytes, and the offset in the file.
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

    def close(self) -> None:
        """Do nothing: neighbours may share the read, and the last reference gives the memory back."""

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


def read_pieces(
    files: Sequence[File], pieces: Iterable[tuple[SavedTensor, SavedPiece, T]]
) -> Generator[tuple[FileRead, T], None, None]:
    """Read pieces of data files, in order, each with what else is said of it. Neighbours share the read of a piece."""
    memory = PieceMemory()
    known: weakref.WeakValueDictionary[tuple[int, int], FileRead] = weakref.WeakValueDictionary()

    def start(saved: SavedTensor, piece: SavedPiece) -> FileRead:
        place = piece.file, piece.offset
        read = known.get(place)
        if read is None:
            read = known[place] = FileRead(files[piece.file], saved, piece, memory)
        return read

    return read_ahead(
        Transfer(piece.count * saved.dtype.itemsize + piece.padding, partial(start, saved, piece), what)
        for saved, piece, what in pieces
    )


class Target(Protocol):
    """What elements of a tensor are read into, such as a `TensorShard`."""

    @property
    def box(self) -> Box:
        """Which elements of the tensor there are here."""
        ...

    @property
    def wanted(self) -> list[range]:
        """The elements that are to be read."""
        ...

    def chunks(self, elements: range) -> list[range]:
        """Divide elements into parts that are read at a time."""
        ...

    def overwritten(self, elements: range) -> AbstractContextManager[torch.Tensor]:
        """Open a block that sets a part in memory, which is then sent to where it belongs. Parts come in order."""
        ...


def fill(targets: Iterable[tuple[SavedTensor, Target]], files: Sequence[File], report: Callable[[int], object]) -> None:
    """Fill targets from data files. `report` is told of bytes that are where they belong. Raises: CheckpointError,
    StoreError."""
    needed = (
        (saved, piece, (target, elements, box))
        for saved, target in targets
        for wanted in target.wanted
        for elements in target.chunks(wanted)
        for box, piece in needed_for(saved, target.box, elements)
    )
    with closing(read_pieces(files, needed)) as reads:
        for (target, elements), pieces in groupby(reads, key=lambda read_and_target: read_and_target[1][:2]):
            with target.overwritten(elements) as memory:
                for read, (_, _, box) in pieces:
                    copy_common(memory, target.box, elements, read.wait(), box, read.piece.elements)
            report(memory.nbytes)


def needed_for(saved: SavedTensor, box: Box, elements: range) -> Iterator[tuple[Box, SavedPiece]]:
    """Give the pieces that have any of some elements of a box, each with the box that it is of.

    A sound manifest has the pieces of a box in order, without gaps. A large tensor has many, which are searched for
    every chunk that is read.
    """
    for shard in saved.boxes:
        source, pieces, wanted = shard.box, shard.pieces, [elements]
        if source != box:
            shared = (part.within(source) for part in box.boxes_of(elements))
            wanted = [source.hull(part) for part in shared if part is not None]
        with_any = (
            range(max(bisect_right(pieces, part.start, key=_start) - 1, 0), bisect_left(pieces, part.stop, key=_start))
            for part in wanted
        )
        for numbers in merged(with_any):
            for piece in pieces[numbers.start : numbers.stop]:
                yield source, piece


def _start(piece: SavedPiece) -> int:
    return piece.start


@torch.no_grad()
def values_of(tensor: torch.Tensor) -> Generator[torch.Tensor, None, None]:
    """Give all elements of a tensor in order, flat, on the CPU; each piece is valid until the next is asked for.

    Where several ranks have shards of the tensor, every rank asks for all pieces, and gets the same.
    """
    if isinstance(tensor, StoredTensor) and not tensor.views:
        storage, shard = tensor.stored, tensor.stored.shard
        if shard.in_shards:
            shard.ranks.meet(f"the gather of {storage.name}")
        held = storage.refreshed()
        yield from _of_all_ranks(storage, held) if shard.partitioned else _in_order(held)
        return
    with gathered(tensor) as value:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert isinstance(value, torch.Tensor)
        yield value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)


def _in_order(held: StoredBytes) -> Iterator[torch.Tensor]:
    """Give all elements, in order: the next piece is on its way while one is looked at."""
    itemsize = held.allocation.dtype.itemsize
    parts = pieces_of(range(held.count), itemsize)
    transfers = (Transfer(len(part) * itemsize, partial(held.window, part.start, len(part)), None) for part in parts)
    with closing(read_ahead(transfers, 2 * PIECE)) as reads:
        for window, _ in reads:
            yield window.wait()
            window.close()


def _of_all_ranks(storage: TensorStorage, held: StoredBytes) -> Iterator[torch.Tensor]:
    """Give all elements, in order: each rank sends the pieces of its parts to the others."""
    shard = storage.shard
    parts = [(rank, segment.of_rank(rank)) for segment in shard.shards.segments for rank in range(shard.ranks.shards)]
    for rank, part in ((rank, part) for rank, whole in parts for part in pieces_of(whole, storage.dtype.itemsize)):
        full = torch.empty(len(part), dtype=storage.dtype, device=storage.device.torch_device)
        window = held.device_window(shard.position(part.start), len(part)) if rank == shard.ranks.shard else None
        try:
            own = full if window is None else window.wait()
            shard.ranks.all_gather(full, own, storage.name, owner=rank).wait()
        finally:
            if window is not None:
                window.close()
        yield full.cpu()


# Bytes that may be on their way to the disk, of a value that is replaced, before its next piece follows.
_IN_FLIGHT = 64 << 20


@torch.no_grad()
def replace(storage: TensorStorage, value: torch.Tensor, after_piece: Callable[[], None] | None = None) -> None:
    """Set a tensor as `TensorStorage.set` does, on a disk piece by piece: not all of the value is in memory once more.
    `after_piece` is called after each piece."""
    if storage.tier != "nvme":
        storage.set(value)
        return
    held, elements = storage.settled(), storage.shard.cut(value).reshape(-1)
    for part in pieces_of(range(held.count), storage.dtype.itemsize):
        window = held.window(part.start, len(part), load=False)
        try:
            copy = storage.device.download(elements[part.start : part.stop], window.wait())
        except BaseException:
            window.close()
            raise
        window.store(after=copy)
        storage.tiers.limit_writes(_IN_FLIGHT)
        if after_piece is not None:
            after_piece()
    storage.shard.stale = False
