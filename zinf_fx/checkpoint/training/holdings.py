"""What a rank has of a tensor: which elements, and how they are read and written, some at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zinf_fx.checkpoint.naming import check_has_values
from zinf_fx.errors import CheckpointError
from zinf_fx.optim.elements import open_window
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.tensor.boxes import Box, view_of
from zinf_fx.runtime.tensor.home import Home
from zinf_fx.runtime.tensor.local_parameter import local_part
from zinf_fx.runtime.tensor.quantised import bytes_of
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.runtime.tensor.windows import Window
from zinf_fx.sizes import PAGE, PIECE, pieces_of


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
