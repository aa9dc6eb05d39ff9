"""The elements of tensors, wherever they live, in pieces that fit in memory: read one after the other, or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from zinf_fx.checkpoint.published import Published, PublishedBytes, PublishedValues
from zinf_fx.checkpoint.safetensors_file import TensorInFile, WeightFiles
from zinf_fx.optim.elements import overwritten
from zinf_fx.runtime.tensor.gathered import gathered
from zinf_fx.runtime.tensor.quantised import Quantised, bytes_of
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import pieces_of


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


class FileElements(Protocol):
    """The elements of a tensor that is in files, flat and in order."""

    dtype: torch.dtype

    def read(self, memory: torch.Tensor, first: int) -> None:
        """Fill contiguous `memory`, of this dtype, with the elements from number `first` on."""


class _InOrder:
    """The elements of a tensor that lie in a file as they are."""

    def __init__(self, place: TensorInFile, files: WeightFiles) -> None:
        self.dtype = place.kind.dtype
        self._place, self._files = place, files

    def read(self, memory: torch.Tensor, first: int) -> None:
        self._files.fill(memory, self._place, first * self.dtype.itemsize)


@torch.no_grad()
def fill(tensor: torch.Tensor, files: WeightFiles, place: TensorInFile | Published) -> None:
    """Replace all elements of a tensor by those at a place in files, converted to the tensor's dtype. What is
    published in the format that the tensor is quantised in keeps its codes and scales.

    Of a tensor that several ranks have parts of, every rank reads its own.
    Raises: CheckpointError for a file that is shorter by now, StoreError.
    """
    is_published = isinstance(place, Published)
    if (
        is_published
        and isinstance(tensor, StoredTensor)
        and tensor.views == quantised_as(place, tensor).steps(tensor.shape)
    ):
        _fill_stored(bytes_of(tensor), PublishedBytes(place, files))
        return
    elements = PublishedValues(place, files, tensor.dtype) if is_published else _InOrder(place, files)
    if isinstance(tensor, StoredTensor) and not tensor.views and not (is_published and place.transposed):
        _fill_stored(tensor, elements)
        return
    shape = place.rows_shape if is_published else place.shape
    value = torch.empty(shape, dtype=elements.dtype, device="cpu")
    elements.read(value, 0)
    if is_published and place.transposed:
        value = value.mT
    if isinstance(tensor, DTensor):
        value = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


def quantised_as(published: Published, tensor: torch.Tensor) -> Quantised:
    """How the bytes of a published weight become the values of this tensor."""
    return Quantised(published.format, tensor.dtype, published.transposed)


def _fill_stored(tensor: StoredTensor, elements: FileElements) -> None:
    storage, share = tensor.storage, tensor.storage.share
    owned = share.own if share.partitioned else (range(storage.numel),)
    for part in (part for own in owned for part in pieces_of(own, storage.dtype.itemsize)):
        with overwritten(tensor, part) as memory:
            if elements.dtype == storage.dtype:
                elements.read(memory, part.start)
            else:
                read = torch.empty(len(part), dtype=elements.dtype, device="cpu")
                elements.read(read, part.start)
                memory.copy_(read)
    share.stale = False
    share.agreed = share.ranks.size == 1


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
