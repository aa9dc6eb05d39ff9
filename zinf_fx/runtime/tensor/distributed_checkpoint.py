"""Stored tensors in torch.distributed.checkpoint: each rank saves and loads its own elements, some at a time.

That library asks a tensor for the boxes of it that a rank writes or wants, and for each of these for a tensor: to
pickle it, or to copy into it what was read. Here, that tensor has no elements in memory: they are read from the store
when it is pickled, and go there when it is copied to. So neither saving nor loading gathers anything.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.utils._pytree import tree_map_only

from zinf_fx.errors import StoredTensorError
from zinf_fx.interrupts import held_back
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.memory.host import mapped_empty
from zinf_fx.runtime.tensor.boxes import Box, view_of
from zinf_fx.runtime.tensor.operations import Operand
from zinf_fx.runtime.tensor.pending_gradient import GradientState
from zinf_fx.runtime.tensor.storage import TensorStorage, new_storages
from zinf_fx.sizes import PIECE, pieces_of

if TYPE_CHECKING:  # it takes long to import, and only programs that have done so call what is here
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten

# Bytes that are worth looking for others that nobody has any more.
_LARGE = 1 << 20


class Checkpointable(Operand):
    """What torch.distributed.checkpoint calls of a stored tensor: its protocol `_Checkpointable`.

    Views, and local tensors of DTensors, which don't say where they begin in these, have none of it: they are gathered.
    """

    _boxes: dict[tuple[int, ...], Box]  # that were listed last, by where they begin

    @property
    def __create_write_items__(self) -> Callable[[str, object], list[WriteItem]]:
        return self._of_whole(self._write_items)

    @property
    def __create_chunk_list__(self) -> Callable[[], list[ChunkStorageMetadata]]:
        return self._of_whole(self._chunk_list)

    @property
    def __get_tensor_shard__(self) -> Callable[[MetadataIndex], torch.Tensor]:
        return self._of_whole(self._box_at)

    def _of_whole(self, method: Callable) -> Callable:
        if self.captured or self.views or self.base.is_part:
            raise AttributeError("only whole stored tensors are saved and loaded in boxes")
        return method

    def _write_items(self, name: str, tensor: object) -> list[WriteItem]:
        """Return an item for each box that this rank is to save."""
        shard = self.stored.shard
        if self.stored.gradient_state is GradientState.LOCAL:
            raise StoredTensorError(
                f"'{name}' is a gradient of this rank alone, which no other rank knows: save after a backward pass "
                "outside of no_sync()"
            )
        pieces = [piece for own in shard.own for piece in pieces_of(own, self.dtype.itemsize, _nbytes(self.stored))]
        boxes = [box for piece in pieces for box in self._all_of_it.boxes_of(piece)]
        self._note(boxes if self.numel() else [self._all_of_it])
        return write_items(name, self, self._boxes.values())

    def _chunk_list(self) -> list[ChunkStorageMetadata]:
        """Return the metadata of each box that this rank is to load."""
        shard = self.stored.shard
        held = shard.own if shard.partitioned else (range(self.numel()),)
        self._note([box for part in held for box in self._all_of_it.boxes_of(part)])
        return chunk_list(self._boxes.values())

    def _box_at(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box, of those that were listed last, that begins there."""
        return StoredBox(self.stored, self._all_of_it, self._boxes[tuple(index.offset or ())])

    def _note(self, boxes: list[Box]) -> None:
        self._boxes = {box.offsets: box for box in boxes}

    @property
    def _all_of_it(self) -> Box:
        return Box.whole(self.shape)


def chunk_list(boxes: Iterable[Box]) -> list[ChunkStorageMetadata]:
    """Return the boxes of a tensor, as the library lists them."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in boxes]


def write_items(name: str, tensor: torch.Tensor, boxes: Iterable[Box]) -> list[WriteItem]:
    """Return the boxes of the tensor of this name that are to be saved, as the library lists them."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    how = TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    items = []
    for chunk in chunk_list(boxes):
        written = TensorWriteData(chunk, how, tensor.size())
        items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=written))
    return items


def own_memory(nbytes: int) -> torch.Tensor:
    """Allocate bytes that are in no arena, and go back to the system where they are many."""
    return mapped_empty(nbytes)[:nbytes] if nbytes >= _LARGE else torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class UnreadBox(torch.Tensor):
    """A box of a tensor whose elements are elsewhere, as a tensor on the CPU without memory.

    What computes with it, or pickles it, reads the elements.
    """

    _box: Box

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    def __new__(cls, dtype: torch.dtype, box: Box) -> Self:
        tensor = torch.Tensor._make_wrapper_subclass(cls, box.shape, dtype=dtype, device=torch.device("cpu"))
        tensor._box = box
        return tensor

    @abstractmethod
    def value(self) -> torch.Tensor:
        """Return the elements, in memory of their own."""

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Pickles as an ordinary tensor."""
        if self.nbytes >= _LARGE:
            gc.collect(1)  # torch.save leaves what it has pickled in a cycle of references
        return self.value().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}(offsets={self._box.offsets}, shape={self._box.shape}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._of(args[0]._box)
        if func._schema.is_mutable:
            raise StoredTensorError(f"{func} on a box of a stored tensor would be lost: copy_() to it")
        read_args, read_kwargs = tree_map_only(UnreadBox, lambda box: box.value(), (args, kwargs))
        return func(*read_args, **read_kwargs)

    @abstractmethod
    def _of(self, box: Box) -> UnreadBox:
        """Return another box of the same tensor."""


class StoredBox(UnreadBox):
    """A box of a stored tensor, whose elements this rank holds: `copy_` to it, or to a part of it, writes them."""

    _stored: TensorStorage
    _whole: Box

    def __new__(cls, storage: TensorStorage, whole: Box, box: Box) -> Self:
        """`whole` is the box of all elements of the storage."""
        tensor = UnreadBox.__new__(cls, storage.dtype, box)
        tensor._stored, tensor._whole = storage, whole
        return tensor

    @held_back
    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """Return the elements, in memory of their own: whoever saves in the background has no part in the host
        arena."""
        value = own_memory(self.nbytes).view(self.dtype).view(self._box.shape)
        for part in self._parts():
            elements = self._whole.hull(part)
            held, start = self._stored.settled(), self._stored.shard.position(elements.start)
            (there,) = held.copied([range(start, start + len(elements))])
            self._in(value, part).copy_(view_of(there, self._whole, elements.start, part))
        return value

    @held_back
    @torch.no_grad()
    def write(self, value: torch.Tensor) -> None:
        """Set the elements. Raises: StoreError."""
        shard = self._stored.shard
        for part in self._parts():
            with RUNNING.turn(), self._to_be_set(part) as elements:
                elements.copy_(self._in(value, part))
        shard.stale = False
        shard.agreed = shard.ranks.size == 1

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        step = args[4:]
        if func is aten.slice.Tensor and step in ((), (1,)):
            return args[0]._sliced(*args[1:4])
        if func is aten.copy_.default and isinstance(args[0], cls):
            args[0].write(args[1])
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _sliced(self, dim: int = 0, start: int | None = None, end: int | None = None) -> StoredBox:
        first, last, _ = slice(start, end).indices(self._box.shape[dim])
        return self._of(_narrowed(self._box, dim, first, max(0, last - first)))

    def _of(self, box: Box) -> StoredBox:
        return StoredBox(self._stored, self._whole, box)

    def _parts(self) -> Iterator[Box]:
        """Divide the box into parts whose elements lie so close together that those from the first to the last of each
        are read or written at a time."""
        if self._box.numel:
            yield from _parts_of(self._box, self._whole, _nbytes(self._stored) // self.dtype.itemsize)

    @contextmanager
    def _to_be_set(self, part: Box) -> Iterator[torch.Tensor]:
        """Yield the elements of a part, which go to the store at the end of the block."""
        storage, elements = self._stored, self._whole.hull(part)
        held = storage.settled()
        storage.tiers.limit_writes(PIECE)
        with storage.tiers.stepping():
            start = storage.shard.position(elements.start)
            window = held.window(start, len(elements), load=part.numel < len(elements))
        try:
            yield view_of(window.wait(), self._whole, elements.start, part)
            window.store()
        finally:
            window.close()

    def _in(self, memory: torch.Tensor, part: Box) -> torch.Tensor:
        """Return a part of the box in memory that has all of it."""
        for dim, (offset, size) in enumerate(zip(part.offsets, part.shape, strict=True)):
            memory = memory.narrow(dim, offset - self._box.offsets[dim], size)
        return memory


def copy_of_own(storage: TensorStorage, shape: torch.Size) -> TensorStorage:
    """Copy what this rank is to save of a stored tensor to NVMe; nothing is gathered. Raises: StoreError."""
    copied, whole = new_storages([storage], "nvme", partitioned=True)[0], Box.whole(shape)
    for box in (box for own in storage.shard.own for box in whole.boxes_of(own)):
        for part in _parts_of(box, whole, _nbytes(storage) // storage.dtype.itemsize):
            StoredBox(copied, whole, part).write(StoredBox(storage, whole, part).value())
    return copied


def _nbytes(storage: TensorStorage) -> int:
    """Return how many bytes of a tensor are in memory at a time: no more than of the optimizer's chunks."""
    planned = storage.tiers.chunk_elements
    nbytes = min(PIECE, storage.config.chunk)
    return nbytes if planned is None else min(nbytes, planned * storage.dtype.itemsize)


def _parts_of(box: Box, whole: Box, limit: int) -> Iterator[Box]:
    """Divide a box into parts, each of which lies within `limit` consecutive elements of the whole if it has more than
    one."""
    dim = next((dim for dim, size in enumerate(box.shape) if size > 1), None)
    length = len(whole.hull(box))
    if dim is None or length <= limit:
        yield box
        return
    step = max(1, box.shape[dim] * limit // length)
    for first in range(0, box.shape[dim], step):
        yield from _parts_of(_narrowed(box, dim, first, min(step, box.shape[dim] - first)), whole, limit)


def _narrowed(box: Box, dim: int, first: int, size: int) -> Box:
    offsets, shape = list(box.offsets), list(box.shape)
    offsets[dim], shape[dim] = offsets[dim] + first, size
    return Box(tuple(offsets), tuple(shape))
