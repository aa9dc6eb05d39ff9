"""One stored tensor: its identity, its bytes, what this rank has of them, and its value as a whole."""

from __future__ import annotations

import itertools
import math
import mmap
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from zinf_fx import ops
from zinf_fx.compat.huggingface_hub import token_with_size
from zinf_fx.config import Config, Placement, Tier
from zinf_fx.errors import StoredTensorError
from zinf_fx.interrupts import held_back
from zinf_fx.runtime.memory.device import Device
from zinf_fx.runtime.memory.host import aligned_empty, memory_of_file, octets
from zinf_fx.runtime.memory.process import pass_through
from zinf_fx.runtime.recorder import RECORDER, REFRESH
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_shard import LocalShard, Refresh
from zinf_fx.runtime.tensor.pending_gradient import GradientState, PendingGradient
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import pieces_of

SPILLED_FROM = 1 << 20
"""Bytes of a value that is worth a file of its own."""

_keys = itertools.count(1)

_WRITES_OF_FIRST: ContextVar[bool] = ContextVar("zinf_fx_writes_of_first", default=False)


def new_key() -> int:
    """Return a key that nothing had yet."""
    return next(_keys)


@contextmanager
def writes_of_first() -> Iterator[None]:
    """Ranks take the first one's of the values that eager code of this thread writes to stored tensors in the block:
    all of them run the same writes there. Those that branch on such values, as trunc_normal_ does, go the same way."""
    token = _WRITES_OF_FIRST.set(True)
    try:
        yield
    finally:
        _WRITES_OF_FIRST.reset(token)


def settle(tiers: Tiers, keys: Collection[int], local_shards: Iterable[LocalShard]) -> None:
    """Wait until nothing that goes on in the background is about to change the bytes of storages of the same tiers,
    with these keys and local shards.

    Raises: StoreError in another process.
    """
    tiers.check_process()
    if (background := tiers.background) is not None:
        background.settle(keys)
    for shard in local_shards:
        if shard.refreshing is not None:
            shard.settle()


class TensorStorage:
    """What is behind one stored tensor.

    `value` and `set` are about the whole tensor, and collective where it is partitioned: see [Note: shards in
    storages]. `settled` gives the bytes that this rank holds, all of them or its shard, when nothing in the background
    is about to change them.

    Attributes:
        bytes: the bytes that this rank holds; something in the background may be about to change them. Their allocation
            says on which tier and device they are, and of which dtype.
        key: the value of `token`, the tiny tensor that stands for the bytes in graphs. The token's version counter
            counts the writes, so that autograd notices, as for any tensor, a value that changed between forward and
            backward.
        config: the configuration of the model that the tensor belongs to, with the placement decided.
        shard: this rank's part of the elements, or all of them.
        gradient: what is known of the gradient of a parameter.
        gradient_state: the state of a gradient: see [Note: states of gradients].
        label: what users know the tensor by.
        place: the place of a parameter among those that are updated in one step: in the order in which they were
            stored, or in that of the plans that they are in.
        buffer_place: what every tensor with the bytes of a gradient holds: see [Note: gradient buffers].
        stands_for: the storage of an offloaded parameter that this one, without bytes, stands for while a plan is made.
    """

    key = 0
    gradient_state = GradientState.STORED
    buffer_place: weakref.ref[object] | None = None
    stands_for: TensorStorage | None = None

    _by_key: ClassVar[weakref.WeakValueDictionary[int, TensorStorage]] = weakref.WeakValueDictionary()

    def __init__(self, config: Config, shard: LocalShard, allocation: Allocation, member: int = 0) -> None:
        """Make the storage whose bytes are a member of an allocation, which has room for what this rank holds."""
        self.config, self.shard = config, shard
        self.gradient: PendingGradient[Any] = PendingGradient()
        self.label: str | None = None
        self._snapshot: tuple[weakref.ref[torch.Tensor], int] | None = None  # and its version
        self._parts: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self.bytes = StoredBytes(allocation, range(member, member + 1), ())
        self.renew_key()
        self.place = self.key

    def renew_key(self) -> None:
        """Go under a key that no storage had, with a token of its own: an old one stands for nothing."""
        self._by_key.pop(self.key, None)
        self.key = new_key()
        self.token = token_with_size(self.key, self.numel * self.dtype.itemsize)
        vars(self.token)["owner"] = weakref.ref(self)
        self._by_key[self.key] = self
        self.bytes.tokens = (self.token,)

    @classmethod
    def of_token(cls, token: torch.Tensor) -> TensorStorage:
        """Return the storage that a token stands for: a storage's own, or any copy."""
        owner = token.__dict__.get("owner")
        storage = None if owner is None else owner()
        if storage is None or storage.token is not token:
            storage = cls._by_key.get(int(token))
        place = None if storage is None else storage.buffer_place
        if storage is None or (place is not None and place() is None):  # somebody else may have it
            raise StoredTensorError(
                f"token {int(token)} stands for no living stored tensor of this process: where a saved-tensor hook "
                "copies tensors (save_on_cpu(pin_memory=True) does), use activations='keep'"
            )
        return storage

    def settled(self) -> StoredBytes:
        """Return the bytes, once nothing that goes on in the background is about to change them.

        Raises: StoredTensorError when there are none, StoreError in another process.
        """
        settle(self.tiers, (self.key,), (self.shard,))
        return self.bytes

    @cached_property
    def tiers(self) -> Tiers:
        """The memories and the store that the bytes are in, also after they move. Raises: StoredTensorError when there
        are no bytes."""
        return self.bytes.allocation.tiers

    @cached_property
    def tier(self) -> Tier:
        """The tier of the bytes."""
        return self.bytes.allocation.tier

    @cached_property
    def device(self) -> Device:
        """What the model computes on."""
        return self.bytes.allocation.device

    @cached_property
    def placement(self) -> Placement:
        """The tiers of this model's states."""
        return self.config.own_placement

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.bytes.allocation.dtype

    @cached_property
    def numel(self) -> int:
        """How many elements the whole tensor has."""
        return self.shard.shards.numel

    @property
    def in_place(self) -> bool:
        """Whether all bytes live where the device computes, so that `value` gives them themselves."""
        return self.bytes.on_device is not None and not self.shard.partitioned

    @cached_property
    def has_plain_gradient(self) -> bool:
        """Whether the gradient of the parameter with these bytes is an ordinary tensor.

        [Note: plain gradients]
        Where one rank trains, and a parameter, its gradient and its states all live where graphs compute, nothing of it
        ever moves. So what backward leaves in its `grad` is an ordinary tensor, contiguous, in the parameter's shape.
        Of the host tier, its memory is allocated from the host arena until the last tensor over it is gone. Everywhere
        else gradients are stored tensors, which a step in the background may be reading when the training goes on.
        """
        here = {"device", "host"} if self.device.in_host_memory else {"device"}
        alone = self.shard.ranks.size == 1 and not self.shard.part_of
        placement = self.placement
        return alone and self.in_place and {placement.gradients, placement.optimizer} <= here

    def part(self, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return elements of a tensor that is in place, from `start` on: the bytes themselves, in one tensor for all
        who read them, which lives as long as this. (What a graph returns of it is a clone.)"""
        place = start, tuple(shape)
        if place not in self._parts:
            memory = self.bytes.on_device
            assert memory is not None
            with torch.inference_mode(False), torch.no_grad():
                self._parts[place] = memory[start : start + math.prod(shape)].view(shape)
        return self._parts[place]

    @property
    def name(self) -> str:
        """The name of the tensor in errors."""
        return self.label or f"a tensor of {self.numel} elements"

    @held_back
    def value(self) -> torch.Tensor:
        """Return all elements, flat, on the device: the bytes themselves, or a copy that the caller owns.

        Collective where the tensor is partitioned, or stale: see [Note: rendezvous].
        """
        if self.shard.in_shards:
            self.shard.ranks.meet(f"the gather of {self.name}")
        held = self.refreshed()
        if self.shard.partitioned:
            return self._gathered(held)
        if held.on_device is not None:
            return held.on_device
        if self.device.in_host_memory:
            pass_through(held.nbytes)
            memory = aligned_empty(held.nbytes)[: held.nbytes].view(self.dtype)
            if self.numel:
                held.read(0, memory, memory).wait()
            return memory
        with self.brought(held) as value:
            return value

    @property
    def read_in_parts(self) -> bool:
        """Whether `elements` can be read alone: ranks have no shards of them, and they aren't where the device computes
        anyway."""
        return not self.in_place and not self.shard.in_shards

    @held_back
    def elements(self, parts: Sequence[range]) -> list[torch.Tensor]:
        """Return ranges of the elements, flat, in host memory, to be read, of a tensor that is `read_in_parts`."""
        return self.settled().copied(parts)

    def _gathered(self, held: StoredBytes) -> torch.Tensor:
        full = torch.empty(self.shard.shards.padded, dtype=self.dtype, device=self.device.torch_device)
        with self.brought(held) as own:
            self.shard.gather(full, own, self.name)
        return full[: self.numel]

    @contextmanager
    def brought(self, held: StoredBytes) -> Iterator[torch.Tensor]:
        """Yield all the bytes where the device computes, to be read in the block."""
        with self._moving():
            window = held.device_window().read_only()
            try:
                yield window.wait()
            finally:
                window.close()

    def _moving(self) -> AbstractContextManager[None]:
        """Open `Tiers.moving`, where windows of the bytes allocate memory."""
        return self.tiers.moving() if self.tier == "nvme" else nullcontext()

    def refreshed(self) -> StoredBytes:
        """Return the bytes, once they are final, with the shards that other ranks updated among them."""
        held = self.settled()
        return self.settled() if begin_refresh([self], self.name) else held

    @torch.no_grad()
    def agree(self) -> None:
        """Take over the elements of the first rank, where several ranks have the same ones, and eager code wrote to
        them."""
        shard = self.shard
        if shard.agreed or (shard.partitioned and shard.ranks.replicas == 1):
            shard.agreed = True
            return
        with self._moving():
            window = self.refreshed().device_window()
            try:
                shard.ranks.broadcast(window.wait(), self.name, among_shards=not shard.partitioned)
            except BaseException:
                window.close()
                raise
            window.store()
        shard.agreed = True

    @property
    def takes_first(self) -> bool:
        """Whether what eager code writes is the first rank's: see `writes_of_first`."""
        return self.shard.ranks.size > 1 and _WRITES_OF_FIRST.get()

    @held_back
    @torch.no_grad()
    def take_first(self, value: torch.Tensor) -> None:
        """Overwrite a `value` of all elements, which eager code is about to write, with the first rank's, if this takes
        that. Collective then."""
        if self.takes_first:
            ranks = self.shard.ranks
            ranks.meet(f"a write to {self.name} of a model that is being built")
            ranks.broadcast(value, self.name)

    @torch.no_grad()
    def set(self, value: torch.Tensor, offset: int | None = None) -> None:
        """Write all elements from a tensor of as many elements, as `StoredBytes.set`. Of a partitioned tensor, this
        rank writes its shard."""
        with self._moving():
            self.settled().set(self.shard.cut(value), offset)
        self.shard.stale = False

    def snapshot(self) -> torch.Tensor:
        """Return `value()`, in the same memory for all who hold it at a time, until the bytes are written. It is to be
        read only."""
        value = self._present_snapshot()
        if value is None:
            value = self.spilled() if self.spills else self.value()
            self._snapshot = weakref.ref(value), self.bytes.version
        return value

    @property
    def spills(self) -> bool:
        """Whether who saves the value is to have it in a file that is mapped."""
        return self.tier == "nvme" and self.device.in_host_memory and self.numel * self.dtype.itemsize >= SPILLED_FROM

    @held_back
    def spilled(self) -> torch.Tensor:
        """Return `value()`, in the memory of a file that is the caller's."""
        return spilled(self.value() if self.shard.in_shards else self.settled(), self.config.stores[0])

    def _present_snapshot(self) -> torch.Tensor | None:
        if self._snapshot is None or self._snapshot[1] != self.bytes.version:
            return None
        return self._snapshot[0]()

    def __deepcopy__(self, memo: dict) -> TensorStorage:
        """Return this: who copies a tensor with all its attributes, as async_save does, has the bytes themselves
        elsewhere."""
        return self

    def data_ptr(self) -> int:
        """Return an address that tells this storage from every other, stored or not: where somebody holds a `snapshot`,
        that of the bytes; else the bytes are not there."""
        snapshot = self._present_snapshot()
        return self.token.data_ptr() if snapshot is None or not self.numel else snapshot.data_ptr()

    def size(self) -> int:
        """Return the number of elements, as of any typed storage."""
        return self.numel


def new_storages(
    storages: Sequence[TensorStorage],
    tier: Tier,
    dtype: torch.dtype | None = None,
    partitioned: bool = False,
    elements: int = 1,
) -> list[TensorStorage]:
    """Make uninitialised storages in one allocation for tensors divided over the ranks as those of `storages` are, of
    one model; one element of `dtype` (default: theirs) for so many `elements` of theirs."""
    first, dtype = storages[0], dtype or storages[0].dtype
    local_shards = []
    for storage in storages:
        shard = storage.shard
        shards = shard.shards if elements == 1 else shard.shards.in_blocks(elements)
        local_shards.append(new := LocalShard(shards, shard.ranks, partitioned))
        new.part_of = shard.part_of
    allocation = Allocation(first.tiers, tier, [shard.held for shard in local_shards], dtype, first.device)
    both = zip(storages, local_shards, strict=True)
    return [TensorStorage(like.config, shard, allocation, member) for member, (like, shard) in enumerate(both)]


def new_gradients(storages: Sequence[TensorStorage], dtype: torch.dtype | None = None) -> list[TensorStorage]:
    """Make uninitialised storages for the gradients of parameters of one model; partitioned from ZeRO's stage 2 on."""
    placement = storages[0].placement
    return new_storages(storages, placement.gradients, dtype, placement.stage >= 2)


def new_states(storages: Sequence[TensorStorage], dtype: torch.dtype | None = None) -> list[TensorStorage]:
    """Make uninitialised storages for an optimizer's state of parameters of one model; partitioned from ZeRO's stage 1
    on."""
    placement = storages[0].placement
    return new_storages(storages, placement.optimizer, dtype, placement.stage >= 1)


def new_scales(storages: Sequence[TensorStorage], dtype: torch.dtype, elements: int) -> list[TensorStorage]:
    """Make uninitialised storages for the scales of an optimizer's state, one of `dtype` for so many elements of the
    state, divided as that is: on the device where the states live there, else in host memory."""
    placement = storages[0].placement
    tier: Tier = "device" if placement.optimizer == "device" else "host"
    return new_storages(storages, tier, dtype, placement.stage >= 1, elements)


def begin_refresh(storages: Sequence[TensorStorage], name: str) -> list[Refresh]:
    """Start to gather the shards that other ranks updated, in one collective, if the bytes of some are stale. Returns
    what is under way, for which whoever looks at the bytes waits. `name` is for errors."""
    stale = [storage for storage in storages if storage.shard.stale]
    if stale:
        for storage in stale:
            storage.shard.stale = False
        with RECORDER.about(kinds=REFRESH):
            refresh = Refresh([(storage.shard, storage.bytes.in_memory) for storage in stale], name)
        for storage in stale:
            storage.shard.refreshing = refresh
    return list(dict.fromkeys(storage.shard.refreshing for storage in storages if storage.shard.refreshing is not None))


def spilled(value: StoredBytes | torch.Tensor, directory: Path) -> torch.Tensor:
    """Return all elements, flat, in the memory of a file without a name in `directory`, which ends with the tensor.

    It is for code that wants the address of a large value. Libraries that save a model hold the values of many tensors
    at a time. In memory of their own, these would take as much as the model. In a file that is mapped, the system
    writes pages to the disk, and drops them, when it is short.

    Raises: StoreError where there is no room for it.
    """
    memory = memory_of_file(directory, value.nbytes)
    dtype = value.allocation.dtype if isinstance(value, StoredBytes) else value.dtype
    start = 0
    for piece in _pieces(value) if isinstance(value, StoredBytes) else [value]:
        memory[start : start + piece.nbytes] = octets(piece)
        start += piece.nbytes
    memory.madvise(mmap.MADV_DONTNEED)  # what was written is in the file
    return torch.frombuffer(memory, dtype=dtype)


def _pieces(held: StoredBytes) -> Iterable[torch.Tensor]:
    """Yield all elements in order; each piece is valid until the next is asked for."""
    for part in pieces_of(range(held.count), held.allocation.dtype.itemsize):
        window = held.window(part.start, len(part)).read_only()
        try:
            yield window.wait()
        finally:
            window.close()


@torch.library.impl(ops.gather.name(), "CompositeExplicitAutograd")
def _gather_kernel(token: torch.Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Run `zinf.gather` in eager code. Bytes that live on the device are returned themselves: no caller may write to
    them."""
    return TensorStorage.of_token(token).value().view(shape)
