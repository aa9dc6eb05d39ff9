"""Where gradients live: in buffers that are used again in every step, side by side as their parameters are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from zinf_fx.runtime.memory.arena import CachedViews
from zinf_fx.runtime.tensor.storage import new_gradients
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes, side_by_side
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import round_up

_ALIGNMENT = 64  # bytes: a cache line


class BufferPlace:
    """The place of one gradient in a buffer. It is free when no tensor with the gradient's bytes holds this object.

    Attributes:
        buffer: the buffer.
        member: the number of the place in it.
    """

    __slots__ = ("__weakref__", "_memory", "buffer", "member")

    def __init__(self, buffer: GradientBuffer, member: int, memory: _Memory) -> None:
        """`memory` stands for that of the whole buffer, which is there while anybody holds it."""
        self.buffer, self.member, self._memory = buffer, member, memory


class _Memory:
    """What all places of a buffer hold that were acquired together."""


class GradientRun(NamedTuple):
    """Consecutive places of a buffer.

    Attributes:
        bytes: the bytes of all places, with what lies between them.
        cut: makes the gradients of memory with all of them.
        nbytes: how many bytes they have, without what lies between them.
    """

    bytes: StoredBytes
    cut: CachedViews
    nbytes: int


class GradientBuffer:
    """Places for the gradients of some parameters, side by side in the order in which these were made.

    [Note: gradient buffers]
    A gradient acquires its `BufferPlace`, which every tensor with its bytes holds, and releases it with the last of
    these. Then the next gradient may acquire it. On NVMe, a place stays reserved meanwhile. In host memory, all places
    are acquired at once; the memory goes back to the arena when the last of them is released, and the next gradients
    acquire the same memory, if nobody else has it by then.

    Attributes:
        dtype: the dtype of the gradients.
    """

    def __init__(self, parameters: Sequence[StoredTensor], dtype: torch.dtype | None = None) -> None:
        """Raises: StoreError when there is no room."""
        storages = [parameter.stored for parameter in parameters]
        self._storages = new_gradients(storages, dtype)
        first = self._storages[0]
        self.dtype, self._allocation = first.dtype, first.bytes.allocation
        self._keys = tuple(storage.key for storage in storages)
        self._places = [(parameter.shape, parameter.device) for parameter in parameters]
        self._returns_memory = first.tier == "host" and first.shard.ranks.size == 1
        self._was_acquired = False
        self._runs: dict[range, GradientRun] = {}

    @property
    def is_kept(self) -> bool:
        """Whether its places are acquired again. Other memory goes with the gradients."""
        return self._returns_memory or self._allocation.tier == "nvme"

    def keep(self, parameters: Sequence[StoredTensor]) -> None:
        """Let later gradients of these parameters, whose buffer this is, find it."""
        for parameter in parameters:
            parameter.stored.gradient.buffers[self._keys] = self

    def members_of(self, keys: tuple[int, ...]) -> range | None:
        """Return which places are for the gradients of the parameters with these keys; None if they aren't
        consecutive."""
        first = self._keys.index(keys[0]) if keys[0] in self._keys else 0
        members = range(first, first + len(keys))
        return members if self._keys[first : members.stop] == keys else None

    def acquire(self, members: range) -> list[StoredTensor] | None:
        """Return new gradients in these places, without values yet; None where that can't be now."""
        storages = self._storages[members.start : members.stop]
        for storage in storages:
            if storage.buffer_place is not None and storage.buffer_place() is not None:
                return None
        memory = _Memory()
        if self._returns_memory:
            if len(members) < len(self._storages) or (self._was_acquired and not self._allocation.acquire_again()):
                return None
            self._allocation.release_with(memory)
        self._was_acquired = True
        gradients = []
        for member, storage in zip(members, storages, strict=True):
            place = BufferPlace(self, member, memory)
            storage.buffer_place = weakref.ref(place)
            gradients.append(StoredTensor.of(storage, *self._places[member]))
        return gradients

    def run(self, members: range) -> GradientRun:
        """Return these places as one."""
        if members not in self._runs:
            storages = self._storages[members.start : members.stop]
            held = [storage.bytes for storage in storages]
            starts = [place.elements.start - held[0].elements.start for place in held]
            parts = [slice(start, start + place.count) for start, place in zip(starts, held, strict=True)]
            shapes = [
                (storage.shard.held,) if storage.shard.partitioned else tuple(self._places[member][0])
                for member, storage in zip(members, storages, strict=True)
            ]
            nbytes = sum(place.nbytes for place in held)
            self._runs[members] = GradientRun(side_by_side(held), CachedViews(parts, shapes), nbytes)
        return self._runs[members]


def run_of(gradients: Sequence[StoredTensor]) -> GradientRun | None:
    """Return where gradients live, if these are consecutive places of one buffer."""
    first = gradients[0].buffer_place
    if not isinstance(first, BufferPlace):
        return None
    members = range(first.member, first.member + len(gradients))
    for member, gradient in zip(members, gradients, strict=True):
        place = gradient.buffer_place
        if not isinstance(place, BufferPlace) or place.buffer is not first.buffer or place.member != member:
            return None
    return first.buffer.run(members)


def reserve_gradients(parameters: Sequence[StoredTensor]) -> None:
    """Reserve places for the gradients of parameters that live side by side, or of one, where space may run out: on
    disk.

    Raises: StoreError when there is none, now and not in the first backward pass.
    """
    first = parameters[0]
    if first.requires_grad and first.grad is None and first.stored.placement.gradients == "nvme":
        GradientBuffer(parameters).keep(parameters)


def stored_gradients(parameters: Sequence[StoredTensor], dtype: torch.dtype) -> list[StoredTensor]:
    """Return gradients without values yet, on the tier of gradients, for parameters in the order in which these were
    made: all in one buffer, unless some places on NVMe are taken."""
    keys = tuple([parameter.stored.key for parameter in parameters])
    for buffer in parameters[0].stored.gradient.buffers.values():
        members = buffer.members_of(keys) if buffer.dtype == dtype else None
        if members is not None and (gradients := buffer.acquire(members)) is not None:
            return gradients
    if len(parameters) > 1 and parameters[0].stored.placement.gradients == "nvme":
        return [gradient for parameter in parameters for gradient in stored_gradients([parameter], dtype)]
    buffer = GradientBuffer(parameters, dtype)
    if buffer.is_kept and parameters[0].stored.placement.gradients == "host":
        buffer.keep(parameters)
    gradients = buffer.acquire(range(len(parameters)))
    assert gradients is not None, "nobody has a place of a new buffer"
    return gradients


def plain_gradient(parameter: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an ordinary gradient without values yet, in the memory of its tier: see [Note: plain gradients].

    Raises: StoreError when the host arena has no room.
    """
    storage = parameter.stored
    if storage.placement.gradients == "device":
        return torch.empty(parameter.shape, dtype=dtype, device=storage.device.torch_device)
    (made,) = plain_gradients(storage.tiers, [(parameter.shape, dtype)])
    return made


def plain_gradients(tiers: Tiers, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    """Return ordinary gradients of these shapes and dtypes in host memory, as `plain_gradient`: in one buffer, which
    goes back when nobody has any of them."""
    sizes = [round_up(shape.numel() * dtype.itemsize, _ALIGNMENT) for shape, dtype in kinds]
    starts = [0, *accumulate(sizes)]
    buffer = tiers.allocate(starts.pop())
    return buffer.owning_tensors([(start, shape, dtype) for start, (shape, dtype) in zip(starts, kinds, strict=True)])
