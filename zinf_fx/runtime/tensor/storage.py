"""Where the bytes of a stored tensor live, and how a part of them is brought to where it is worked on, and back."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from zinf_fx.config import Config, Placement, Tier
from zinf_fx.errors import StoredTensorError, StoreError
from zinf_fx.interrupts import held_back
from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.memory.buffers import aligned_empty
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.memory.leases import PAGE, Buffer, Ticket
from zinf_fx.runtime.ranks import ALONE, Collective, Ranks
from zinf_fx.runtime.recorder import RECORDER, REFRESH
from zinf_fx.runtime.remains import when_gone
from zinf_fx.runtime.tensor.tiers import DelayedWrite, Tiers
from zinf_fx.runtime.tensor.token import token_of
from zinf_fx.runtime.tensor.windows import DeviceWindow, Under, Window, forget_what_is_done

# Element offsets of windows are multiples of this, so that their byte offsets suit direct I/O for every dtype, and
# vectorised kernels cut a tensor where they would without windows.
WINDOW_ALIGNMENT = 4096

_keys = itertools.count(1)


_FOR_PLANNING = "this tensor was made for planning only and has no values: offload a real model to run it"


class GradientConsumer(Protocol):
    """What takes a parameter's gradient as soon as it is whole: an optimizer that steps in backward."""

    def arrived(self, parameter: torch.Tensor) -> None:
        """`parameter.grad` is whole, and what is left of backward needs neither it nor the parameter's value."""

    def make_room(self, nbytes: int) -> None:
        """Before a gradient of so many bytes is kept in memory until it is consumed."""

    def interrupted(self, error: BaseException) -> None:
        """`error` ended a backward pass in the middle."""


class TensorStorage:
    """The bytes of one stored tensor, flat, on one tier: all of them or, of a partitioned one, this rank's shard.

    [Note: shards in storages]
    `numel` counts the tensor's elements, `held` those that are here. `value` and `set` are about the whole tensor, and
    collective where it is partitioned. Windows are about what is held: `position` says where in it an element is.
    Where every rank has all elements, but each updates its own share only (ZeRO, stages 1 and 2), a storage is `stale`
    from an update until the other shares are gathered, before the next look at the whole.

    `key` is the value of `token`, the tiny tensor that stands for these bytes in graphs. The token's version counter
    counts the writes, so that autograd notices, as for any tensor, a value that changed between forward and backward.
    `config` is that of the model the tensor belongs to, with the placement decided, and `device` what it computes on.
    `part_of`: the process groups over whose ranks the tensor is divided that this is a part of (tensor parallelism).
    `followers` are windows for reading that stay in memory, and which every write to the store changes too.
    `consumer` is told when the gradient of the parameter with these bytes is whole; `backwards_due` compiled forward
    passes with it have no backward pass yet.
    """

    _by_key: ClassVar[weakref.WeakValueDictionary[int, TensorStorage]] = weakref.WeakValueDictionary()

    @held_back
    def __init__(
        self,
        tiers: Tiers,
        tier: Tier,
        config: Config,
        numel: int,
        dtype: torch.dtype,
        device: Device = CPU,
        ranks: Ranks = ALONE,
        partitioned: bool = False,
        shards: Shards | None = None,
    ) -> None:
        """Reserve space on `tier`; for one shard, if `partitioned` over `ranks`. `shards`: how; default in one segment.

        Raises: StoreError when there is not enough, before anything else is changed.
        """
        self._identify(tier, config, numel, dtype)
        self.tiers, self.device, self.ranks = tiers, device, ranks
        self.shards = shards or Shards.of(numel, ranks.shards, config.placement.on_nvme)
        self.partitioned = partitioned and ranks.shards > 1
        self.held = self.shards.held_by(ranks.shard) if self.partitioned else numel
        self.nbytes = self.held * dtype.itemsize
        # What is under way between where the bytes live and anywhere else.
        self._writes: Under = []
        self.reads: Under = []
        self._extent = None
        self._in_host: torch.Tensor | None = None  # the bytes, where the CPU can work on them
        self._on_device: torch.Tensor | None = None  # the bytes, where the device can
        if not device.in_host_memory:
            tiers.host.serve(device)
        if tier == "nvme":
            self._extent = tiers.store.allocate(self.nbytes)
            self._at_end(tiers.store.free, self._extent)
        elif tier == "host":
            buffer = tiers.lease(self.nbytes)
            self._in_host = buffer.tensor((self.held,), dtype)
            self._at_end(buffer.release)
        else:
            with torch.inference_mode(False):
                self._on_device = torch.empty(self.held, dtype=dtype, device=device.torch_device)
        if device.in_host_memory:
            self._in_host = self._on_device = self._in_host if tier == "host" else self._on_device

    @classmethod
    def abstract(
        cls, tier: Tier, config: Config, numel: int, dtype: torch.dtype, why: str = _FOR_PLANNING
    ) -> TensorStorage:
        """A storage without bytes, for planning: it has a token, and any access to a value raises, saying `why`."""
        storage = cls.__new__(cls)
        storage._identify(tier, config, numel, dtype)
        storage.tiers = storage._in_host = storage._on_device = None
        storage.device, storage._why_abstract = CPU, why
        storage.ranks, storage.partitioned, storage.held = ALONE, False, numel
        storage.shards = Shards.of(numel, 1, False)
        return storage

    def _identify(self, tier: Tier, config: Config, numel: int, dtype: torch.dtype) -> None:
        self.tier, self.config = tier, config
        self.numel, self.dtype = numel, dtype
        self.nbytes = numel * dtype.itemsize
        self._snapshot: tuple[weakref.ref[torch.Tensor], int] | None = None  # and its version
        self.gradient_space: TensorStorage | None = None  # reserved for the first gradient
        self.consumer: GradientConsumer | None = None
        self.backwards_due = 0
        self.stale = False
        self._order = threading.RLock()  # while a transfer finds out what it is to follow, until others see it
        self.agreed = True  # whether every rank that has all elements has the same
        self.unreduced = False  # whether these are gradients of this rank alone
        self.part_of: tuple[dist.ProcessGroup, ...] = ()
        self.label: str | None = None  # what users know the tensor by
        self._refreshing: _Refresh | None = None
        self.followers: weakref.WeakSet[Window] = weakref.WeakSet()
        self.key = 0
        self.renew_key()

    def renew_key(self) -> None:
        """Go under a key that no storage had, with a token of its own: the old ones stand for nothing."""
        self._by_key.pop(self.key, None)
        self.key = next(_keys)
        self.token = token_of(self.key, self.numel * self.dtype.itemsize)
        self._by_key[self.key] = self

    @classmethod
    def of_token(cls, token: torch.Tensor) -> TensorStorage:
        """The storage that a token stands for."""
        storage = cls._by_key.get(int(token))
        if storage is None:
            raise StoredTensorError(
                f"token {int(token)} stands for no living stored tensor of this process: where a saved-tensor hook "
                "copies tensors (save_on_cpu(pin_memory=True) does), use activations='keep'"
            )
        return storage

    @property
    def placement(self) -> Placement:
        """The tiers of this model's states."""
        return self.config.placement

    @property
    def in_place(self) -> bool:
        """Whether all bytes live where the device computes, so that `value` gives them themselves."""
        return self._on_device is not None and not self.partitioned

    @property
    def name(self) -> str:
        """For errors."""
        return self.label or f"a tensor of {self.numel} elements"

    @property
    def in_memory(self) -> torch.Tensor:
        """All bytes, flat, where they live: on the device or in host memory."""
        memory = self._on_device if self._on_device is not None else self._in_host
        assert memory is not None, "only tensors in memory are updated in shares"
        return memory

    @property
    def own(self) -> tuple[range, ...]:
        """The elements of the tensor that this rank's shard has."""
        return self.shards.of_rank(self.ranks.shard)

    def position(self, element: int) -> int:
        """Where an element of the tensor is among those held."""
        return self.shards.position(self.ranks.shard, element) if self.partitioned else element

    @property
    def in_shares(self) -> bool:
        """Whether each rank has the present version of its own share only. All ranks answer alike, also where one's
        share is the whole of a small tensor: collectives depend on it."""
        return self.partitioned or self.stale

    @property
    def current(self) -> tuple[range, ...]:
        """The elements of the tensor that are here, in their present version."""
        return self.own if self.in_shares else (range(self.numel),)

    @property
    def in_host_memory(self) -> bool:
        """Whether the bytes live in host memory, so that `window` gives them themselves."""
        return self._in_host is not None

    @property
    def version(self) -> int:
        """How often the bytes were written."""
        return self.token._version

    def for_gradient(self, dtype: torch.dtype | None = None, partitioned: bool = True) -> TensorStorage:
        """New, uninitialised storage for the gradient; partitioned, unless told otherwise, from ZeRO's stage 2 on."""
        placement = self.placement
        return self.like(placement.gradients, dtype, partitioned and placement.stage >= 2)

    def for_state(self, dtype: torch.dtype | None = None) -> TensorStorage:
        """New, uninitialised storage for an optimizer's state; partitioned from ZeRO's stage 1 on."""
        return self.like(self.placement.optimizer, dtype, self.placement.stage >= 1)

    def like(self, tier: Tier, dtype: torch.dtype | None = None, partitioned: bool = False) -> TensorStorage:
        """New, uninitialised storage for a tensor of as many elements."""
        tiers, dtype = self.usable_tiers(), dtype or self.dtype
        how = (self.device, self.ranks, partitioned, self.shards)
        storage = TensorStorage(tiers, tier, self.config, self.numel, dtype, *how)
        storage.part_of = self.part_of
        return storage

    def window(
        self, start: int = 0, count: int | None = None, *, load: bool = True, offset: int | None = None
    ) -> Window:
        """`count` of the elements held, from `start` on (default all), in host memory; if they are moved there, to
        where `offset` says (see `Tiers.lease`).

        With `load`, reading them starts at once; without, their values are undefined until written. The store moves
        whole blocks: what a window has in common with its neighbours' blocks is read in any case, and written back.
        Both ends on multiples of WINDOW_ALIGNMENT (or at the end) spare that.
        """
        tiers = self.settle()
        count = self._count(start, count)
        if self._in_host is not None:
            self._settle(range(start, start + count))
            return Window(self, start, self._in_host[start : start + count], None, None)
        per_block = PAGE // self.dtype.itemsize if self._extent is not None else 1
        first = start // per_block * per_block
        end = min(-(-(start + count) // per_block) * per_block, self.held) if count else first
        shared = first < start or end > start + count
        buffer = tiers.lease((end - first) * self.dtype.itemsize, offset)
        try:
            memory = buffer.tensor((end - first,), self.dtype)
            ticket = self._read(first, memory, buffer) if (load or shared) and count else None
        except BaseException:
            buffer.release()
            raise
        return Window(self, first, memory, buffer, ticket, slice(start - first, start - first + count))

    def device_window(
        self, start: int = 0, count: int | None = None, *, load: bool = True, offset: int | None = None
    ) -> Window | DeviceWindow:
        """As `window`, in device memory. `offset` is where in host memory they pass through."""
        self.settle()
        count = self._count(start, count)
        if self._on_device is not None:
            return Window(self, start, self._on_device[start : start + count], None, None)
        host = self.window(start, count, load=load, offset=offset)
        if self.device.in_host_memory:
            return host
        arena = self.tiers.device_arenas.get(self.device)
        return DeviceWindow(host, self.device, count, self.dtype, load, arena)

    @held_back
    def value(self) -> torch.Tensor:
        """All elements, flat, on the device: the bytes themselves, or a copy that the caller owns.

        Collective where the tensor is partitioned, or stale: see [Note: meetings].
        """
        if self.in_shares:
            self.ranks.meet(f"the gather of {self.name}")
        self.refresh()
        if self.partitioned:
            return self._gathered()
        if self._on_device is not None:
            return self._on_device
        if self.device.in_host_memory:
            memory = aligned_empty(self.nbytes)[: self.nbytes].view(self.dtype)
            if self.numel:
                self._read(0, memory, memory).wait()
            return memory
        window = self.device_window().read_only()
        try:
            return window.wait()
        finally:
            window.close()

    def _gathered(self) -> torch.Tensor:
        full = torch.empty(self.shards.padded, dtype=self.dtype, device=self.device.torch_device)
        window = self.device_window().read_only()
        try:
            shard = window.wait()
            for collective in self.ranks.all_gather_segments(full, shard, self.shards.segments, self.name):
                collective.wait()
        finally:
            window.close()
        return full[: self.numel]

    def refresh(self) -> None:
        """Wait until the bytes are final, with the shares that other ranks updated among them."""
        self.settle()
        if self.begin_refresh() is not None:
            self.settle()

    def begin_refresh(self) -> _Refresh | None:
        """If the bytes are stale, start to gather the shares that other ranks updated; what is under way, if anything.

        Whoever looks at the bytes waits for it.
        """
        if self.stale:
            self.stale = False
            with RECORDER.about(kinds=REFRESH):
                self._refreshing = _Refresh(self)
        return self._refreshing

    @held_back
    @torch.no_grad()
    def agree(self) -> None:
        """Where several ranks have the same elements, and eager code wrote to them, take over those of the first."""
        if self.agreed or (self.partitioned and self.ranks.replicas == 1):
            self.agreed = True
            return
        self.refresh()
        window = self.device_window()
        try:
            self.ranks.broadcast(window.wait(), self.name, among_shards=not self.partitioned)
        except BaseException:
            window.close()
            raise
        window.store()
        self.agreed = True

    def read_into(self, memory: torch.Tensor, owner: object, start: int = 0) -> Ticket:
        """Start reading what is held from `start` on into `memory`, in `owner`'s buffer."""
        self.settle()
        return self._read(start, memory, owner)

    def snapshot(self) -> torch.Tensor:
        """`value()`, in the same memory for all who hold it at a time, until the bytes are written. To be read only."""
        value = self._present_snapshot()
        if value is None:
            value = self.value()
            self._snapshot = weakref.ref(value), self.version
        return value

    def _present_snapshot(self) -> torch.Tensor | None:
        if self._snapshot is None or self._snapshot[1] != self.version:
            return None
        return self._snapshot[0]()

    def __call__(self) -> TensorStorage:
        """This. So `tensor.storage().data_ptr()` is for a stored tensor what it is for any: see `data_ptr`."""
        return self

    def data_ptr(self) -> int:
        """An address that tells this storage from every other, stored or not: where somebody holds a `snapshot`, that
        of the bytes; else the bytes are not there."""
        snapshot = self._present_snapshot()
        return self.token.data_ptr() if snapshot is None or not self.numel else snapshot.data_ptr()

    def size(self) -> int:
        """The number of elements, as of any typed storage."""
        return self.numel

    @held_back
    @torch.no_grad()
    def set(self, value: torch.Tensor, offset: int | None = None) -> None:
        """Write all elements from a tensor of as many elements (any shape; converted to this dtype); `offset` as for
        `window`. Of a partitioned tensor, this rank writes its shard.

        From the device, the write may be under way when this returns: the caller may drop `value`, but not change it.
        """
        self.set_held(self._shard_of(value) if self.partitioned else value, offset)
        self.stale = False

    def _shard_of(self, value: torch.Tensor) -> torch.Tensor:
        flat, rank = value.reshape(-1), self.ranks.shard
        parts = []
        for one in self.shards.segments:
            own = one.of_rank(rank)
            parts.append(_padded(flat[own.start : own.stop], len(one.held_by(rank))))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @held_back
    @torch.no_grad()
    def set_held(self, value: torch.Tensor, offset: int | None = None) -> None:
        """As `set`, from a tensor of as many elements as are held."""
        self.settle()
        if self._on_device is not None:
            with self.noted(value.nbytes):
                self._on_device.view(value.shape).copy_(value)
            self.written()
        elif self._in_host is not None:
            earlier = [ticket for _, ticket in (*self._writes, *self.reads)]
            copy = self.device.download(value, self._in_host, after=earlier)
            self._writes.clear()
            self.written((range(self.held), copy))
        else:
            window = self.window(load=False, offset=offset)
            try:
                copy = self.device.download(value, window.wait())
            except BaseException:
                window.close()
                raise
            window.store(after=copy)

    def noted(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """For a block in which the CPU copies a value to where it lives; other devices' copies note themselves."""
        leaves = self.tier != "device" and self.device.in_host_memory
        return RECORDER.work("offload", nbytes, CPU.torch_device) if leaves else contextlib.nullcontext()

    def written(self, after: tuple[range, Ticket] | None = None) -> None:
        """Count a write made through `value()` of bytes in place or through a window, which is over when `after` is."""
        if after is not None:
            self._writes.append(after)
        torch.autograd.graph.increment_version(self.token)

    def announce_write(self) -> None:
        """Count a write that work in the background will make. Followers will have it when they are looked at."""
        followers = self.present_followers()
        self.written()
        for follower in followers:
            follower.version = self.version

    def present_followers(self) -> list[Window]:
        """The followers that have had every write so far."""
        return [f for f in self.followers if f.open and f.version == self.version]

    def settle(self) -> Tiers:
        """Wait until nothing that goes on in the background is about to change these bytes. Returns the tiers."""
        tiers = self.usable_tiers()
        if (background := tiers.background) is not None:
            background.settle(self.key)
        if (refreshing := self._refreshing) is not None:
            refreshing.wait()  # one that failed stays: the values are lost, and every later access says so
            self._refreshing = None
        return tiers

    def flush(self) -> None:
        """Wait for the writes under way. Raises: StoreError when one failed: its bytes are lost."""
        self._settle(range(self.held))

    def usable_tiers(self) -> Tiers:
        """The tiers. Raises: StoredTensorError when there are no bytes, StoreError in another process."""
        if self.tiers is None:
            raise StoredTensorError(self._why_abstract)
        self.tiers.check_process()
        return self.tiers

    def _count(self, start: int, count: int | None) -> int:
        count = self.held - start if count is None else count
        assert start >= 0 and count >= 0 and start + count <= self.held, (start, count, self.held)
        return count

    def _read(self, start: int, memory: torch.Tensor, owner: object) -> Ticket:
        count = memory.numel()
        if self._on_device is not None:
            return self.device.download(self._on_device[start : start + count], memory)
        elements = range(start, start + count)
        itemsize = self.dtype.itemsize
        offset, nbytes = start * itemsize, count * itemsize
        with self._order:
            self._settle(elements)
            ticket = self.tiers.store.read(self._extent, memory.data_ptr(), offset, nbytes, owner=owner)
            forget_what_is_done(self.reads)
            self.reads.append((elements, ticket))
        return ticket

    def write_back(self, start: int, memory: torch.Tensor, buffer: Buffer, after: Ticket | None) -> None:
        """Start writing elements to where they live, once `after` is done; takes over their memory, `buffer`."""
        elements = range(start, start + memory.numel())
        offset, nbytes = start * self.dtype.itemsize, memory.nbytes
        try:
            if self._on_device is not None:
                upload = self.device.upload(self._on_device[elements.start : elements.stop])
                upload.start(memory)
                upload.join()
                buffer.release_after(upload)
                return
            write = partial(self.tiers.store.write, self._extent, buffer.address, offset, nbytes)
            with self._order:
                self._settle(elements)
                self.await_reads(elements)
                ticket: Ticket = write() if after is None or after.done() else DelayedWrite(after, write)
                self._writes.append((elements, ticket))
        except BaseException:
            buffer.release()
            raise
        self.tiers.writing(ticket, buffer, self)

    def await_reads(self, elements: range) -> None:
        """Wait until neither the disk nor the device reads what is to change."""
        _await([ticket for read, ticket in list(self.reads) if _overlap(read, elements)])

    def _at_end(self, release: Callable[..., None], *arguments: object) -> None:
        """Call `release` when this storage is gone, and nothing is under way to or from it: what comes next in its
        place must not be overtaken. Not at exit, when the whole scratch directory goes, nor in a process made by fork,
        where nothing is to be given back."""
        when_gone(self, partial(_release, os.getpid(), self._writes, self.reads, release, *arguments))

    def _settle(self, elements: range) -> None:
        """The store promises no order: what touches `elements` follows the writes to them that are under way."""
        for one in list(self._writes):
            written, ticket = one
            if _overlap(written, elements) or ticket.done():
                ticket.wait()  # a failed write stays: these bytes are lost, and every later access says so
                with contextlib.suppress(ValueError):  # another thread waited too
                    self._writes.remove(one)


class _Refresh:
    """Fills a storage that every rank has with the shares that others updated."""

    def __init__(self, storage: TensorStorage) -> None:
        elements = storage.in_memory
        self._collectives: list[Collective] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of a segment with padding, which has no room there
        for one in storage.shards.segments:
            own = one.of_rank(storage.ranks.shard)
            mine, full = elements[own.start : own.stop], elements[one.start : one.start + one.count]
            if one.padded > one.count:
                mine, target, full = _padded(mine, one.shard), full, elements.new_empty(one.padded)
                self._copies.append((target, full))
            self._collectives.append(storage.ranks.all_gather(full, mine, storage.name, one.owner))

    def wait(self) -> None:
        """Return when every share is there."""
        for collective in self._collectives:
            collective.wait()
        while self._copies:
            target, full = self._copies.pop()
            target.copy_(full[: target.numel()])


def _padded(elements: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - elements.numel()
    return torch.nn.functional.pad(elements, (0, missing)) if missing else elements


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _await(tickets: Iterable[Ticket]) -> None:
    """Until they are over. A failed read concerns only who asked for the values; `Tiers` reports failed writes."""
    for ticket in tickets:
        with contextlib.suppress(StoreError):
            ticket.wait()


def _release(pid: int, writes: Under, reads: Under, release: Callable[..., None], *arguments: object) -> None:
    if os.getpid() != pid:
        return
    _await(ticket for _, ticket in (*reads, *writes))
    release(*arguments)
