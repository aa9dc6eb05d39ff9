"""Where the bytes of a stored tensor live, and how a part of them is brought to host memory and back."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import weakref
from collections.abc import Iterable
from typing import ClassVar

import torch

from zinf_fx.config import Config, Placement, Tier
from zinf_fx.errors import StoredTensorError, StoreError
from zinf_fx.native.engine import HINTS
from zinf_fx.runtime.buffers import PAGE, Buffer, aligned_empty
from zinf_fx.runtime.store import Extent, Store, Ticket
from zinf_fx.runtime.tiers import Tiers

# Element offsets of windows are multiples of this, so that their byte offsets suit direct I/O for every dtype, and
# vectorised kernels cut a tensor where they would without windows.
WINDOW_ALIGNMENT = 4096

_keys = itertools.count(1)


class TensorStorage:
    """The bytes of one stored tensor, flat, on one tier.

    `key` is the value of `token`, the tiny tensor that stands for these bytes in graphs. The token's version counter
    counts the writes, so that autograd notices, as for any tensor, a value that changed between forward and backward.
    `config` is that of the model the tensor belongs to, with the placement decided. `followers` are windows for reading
    that stay in memory, and which every write to the store changes too.
    """

    _by_key: ClassVar[weakref.WeakValueDictionary[int, TensorStorage]] = weakref.WeakValueDictionary()

    def __init__(self, tiers: Tiers, tier: Tier, config: Config, numel: int, dtype: torch.dtype) -> None:
        """Reserve space on `tier`. Raises: StoreError when there is not enough, before anything else is changed."""
        self._identify(tier, config, numel, dtype)
        self.tiers = tiers
        self._extent = None
        self._resident: torch.Tensor | None = None
        self._writes: list[tuple[range, Ticket]] = []
        self._reads: list[tuple[range, Ticket]] = []
        if tier == "nvme":
            self._extent = tiers.store.allocate(self.nbytes)
            # The whole scratch directory goes at exit.
            weakref.finalize(self, _free, tiers.store, self._extent, self._writes, self._reads).atexit = False
        elif tier == "host":
            buffer = tiers.lease(self.nbytes)
            self._resident = buffer.tensor((numel,), dtype)
            weakref.finalize(self, buffer.release).atexit = False
        else:
            self._resident = torch.empty(numel, dtype=dtype)

    @classmethod
    def abstract(cls, tier: Tier, config: Config, numel: int, dtype: torch.dtype) -> TensorStorage:
        """A storage without bytes, for planning: it has a token, and any access to a value raises."""
        storage = cls.__new__(cls)
        storage._identify(tier, config, numel, dtype)
        storage.tiers = storage._resident = None
        return storage

    def _identify(self, tier: Tier, config: Config, numel: int, dtype: torch.dtype) -> None:
        self.tier, self.config = tier, config
        self.numel, self.dtype = numel, dtype
        self.nbytes = numel * dtype.itemsize
        self.parameter: weakref.ref[torch.Tensor] | None = None
        self._snapshot: tuple[weakref.ref[torch.Tensor], int] | None = None  # and its version
        self.gradient_space: TensorStorage | None = None  # reserved for the first gradient
        self.followers: weakref.WeakSet[Window] = weakref.WeakSet()
        self.key = next(_keys)
        with torch.inference_mode(False):
            self.token = torch.tensor(self.key, dtype=torch.int64, device="cpu")
        self._by_key[self.key] = self

    @classmethod
    def of_token(cls, token: torch.Tensor) -> TensorStorage:
        """The storage that a token stands for."""
        storage = cls._by_key.get(int(token))
        if storage is None:
            raise StoredTensorError(f"token {int(token)} stands for no living stored tensor of this process")
        return storage

    @property
    def placement(self) -> Placement:
        """The tiers of this model's states."""
        return self.config.placement

    @property
    def resident(self) -> bool:
        """Whether the bytes are in memory between uses."""
        return self._resident is not None

    @property
    def version(self) -> int:
        """How often the bytes were written."""
        return self.token._version

    def like(self, tier: Tier, dtype: torch.dtype | None = None) -> TensorStorage:
        """New, uninitialised storage of as many elements beside this one (a gradient, an optimizer state)."""
        return TensorStorage(self._usable_tiers(), tier, self.config, self.numel, dtype or self.dtype)

    def window(self, start: int = 0, count: int | None = None, *, load: bool = True) -> Window:
        """`count` elements from `start` (default all) in host memory.

        With `load`, reading them starts at once; without, their values are undefined until written. The store moves
        whole blocks: what a window has in common with its neighbours' blocks is read in any case, and written back.
        Both ends on multiples of WINDOW_ALIGNMENT (or at the end) spare that.
        """
        tiers = self.settle()
        count = self.numel - start if count is None else count
        assert start >= 0 and count >= 0 and start + count <= self.numel, (start, count, self.numel)
        if self._resident is not None:
            return Window(self, start, self._resident[start : start + count], None, None)
        per_block = PAGE // self.dtype.itemsize
        first = start // per_block * per_block
        end = min(-(-(start + count) // per_block) * per_block, self.numel) if count else first
        shared = first < start or end > start + count
        buffer = tiers.lease((end - first) * self.dtype.itemsize)
        try:
            ticket = self._read(buffer.address, first, end - first, buffer) if (load or shared) and count else None
        except BaseException:
            buffer.release()
            raise
        memory = buffer.tensor((end - first,), self.dtype)
        return Window(self, first, memory, buffer, ticket, slice(start - first, start - first + count))

    def value(self) -> torch.Tensor:
        """All elements, flat: the resident bytes themselves, or a copy that the caller owns."""
        self.settle()
        if self._resident is not None:
            return self._resident
        memory = aligned_empty(self.nbytes)
        if self.numel:
            self._read(memory.data_ptr(), 0, self.numel, memory).wait()
        return memory[: self.nbytes].view(self.dtype)

    def snapshot(self) -> torch.Tensor:
        """`value()`, in the same memory for all who hold it at a time, until the bytes are written. To be read only."""
        value = self._snapshot and self._snapshot[0]()
        if value is None or self._snapshot[1] != self.version:
            value = self.value()
            self._snapshot = weakref.ref(value), self.version
        return value

    def __call__(self) -> TensorStorage:
        """This. So `tensor.storage().data_ptr()` is for a stored tensor what it is for any: see `data_ptr`."""
        return self

    def data_ptr(self) -> int:
        """An address that tells this storage from every other, stored or not; the bytes are not there."""
        return self.token.data_ptr()

    def set(self, value: torch.Tensor) -> None:
        """Write all elements from a tensor of as many elements (any shape; converted to this dtype)."""
        window = self.window(load=False)
        try:
            with torch.no_grad():
                window.wait().view(value.shape).copy_(value)
        except BaseException:
            window.close()
            raise
        window.store()

    def written(self) -> None:
        """Count a write made through `value()` of resident bytes or through a window."""
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
        """Wait until no work in the background is about to change these bytes. Returns the tiers."""
        tiers = self._usable_tiers()
        if tiers.background is not None:
            tiers.background.settle(self.key)
        return tiers

    def flush(self) -> None:
        """Wait for the writes under way. Raises: StoreError when one failed: its bytes are lost."""
        self._settle(range(self.numel))

    def _usable_tiers(self) -> Tiers:
        if self.tiers is None:
            raise StoredTensorError(
                "this tensor was made for planning only and has no values: offload a real model to run it"
            )
        if os.getpid() != self.tiers.pid:
            raise StoreError("use", "stored tensor", HINTS[errno.ECHILD], errno=errno.ECHILD)
        return self.tiers

    def _read(self, address: int, start: int, count: int, owner: object) -> Ticket:
        elements = range(start, start + count)
        self._settle(elements)
        itemsize = self.dtype.itemsize
        ticket = self.tiers.store.read(self._extent, address, start * itemsize, count * itemsize, owner=owner)
        self._reads[:] = [(read, earlier) for read, earlier in self._reads if not earlier.done()]
        self._reads.append((elements, ticket))
        return ticket

    def _write(self, buffer: Buffer, start: int, count: int) -> None:
        elements = range(start, start + count)
        itemsize = self.dtype.itemsize
        try:
            self._settle(elements)
            _await_reads(ticket for read, ticket in self._reads if _overlap(read, elements))
            ticket = self.tiers.store.write(self._extent, buffer.address, start * itemsize, count * itemsize)
        except BaseException:
            buffer.release()
            raise
        self._writes.append((elements, ticket))
        self.tiers.writing(ticket, buffer)

    def _settle(self, elements: range) -> None:
        """The store promises no order: what touches `elements` follows the writes to them that are under way."""
        under_way = []
        for written, ticket in self._writes:
            if _overlap(written, elements):
                ticket.wait()  # a failed write stays: these bytes are lost, and every later access says so
            elif not ticket.done():
                under_way.append((written, ticket))
            else:
                ticket.wait()
        self._writes[:] = under_way


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _await_reads(tickets: Iterable[Ticket]) -> None:
    """Until the disk is done with bytes that are to change. Whether a read failed concerns only who asked for it."""
    for ticket in tickets:
        with contextlib.suppress(StoreError):
            ticket.wait()


def _free(store: Store, extent: Extent, writes: list[tuple[range, Ticket]], reads: list[tuple[range, Ticket]]) -> None:
    """Give an extent back once nothing is under way to it: its next owner's writes must not be overtaken."""
    _await_reads(ticket for _, ticket in reads)
    for _, ticket in writes:
        with contextlib.suppress(StoreError):  # these bytes are nobody's any more, and `Tiers` reports the failure
            ticket.wait()
    store.free(extent)


class Window:
    """Consecutive elements of one storage in host memory: wait, use, then `store` or `close`, once."""

    def __init__(
        self,
        storage: TensorStorage,
        start: int,
        memory: torch.Tensor,
        buffer: Buffer | None,
        ticket: Ticket | None,
        meant: slice = slice(None),
    ) -> None:
        """`memory`: whole blocks, from element `start` on; `meant` are the elements asked for among them."""
        self._storage: TensorStorage | None = storage
        self._start = start
        self._memory, self._buffer, self._ticket = memory, buffer, ticket
        self._meant = meant
        self.open = True
        self.version: int | None = storage.version
        """Of the storage's bytes, when they were read or, for a follower, written; None after a failed write."""

    def read_only(self) -> Window:
        """This window, which can't be stored any more, and doesn't keep the storage alive."""
        self._storage = None
        return self

    @property
    def nbytes_leased(self) -> int:
        """Bytes of the host arena that this window holds; 0 for resident bytes."""
        return self._buffer.nbytes if self._buffer is not None else 0

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ticket is None or self._ticket.done()

    def wait(self) -> torch.Tensor:
        """The elements, 1-D, once they are there; valid until `store` or `close`."""
        assert self.open, "a window was used after it was stored or closed"
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
        return self._memory[self._meant]

    def store(self) -> None:
        """Start writing the elements back; nothing to move for resident bytes."""
        assert self._storage is not None, "a window for reading can't be stored"
        self.wait()
        self.open = False
        memory, self._memory = self._memory, None
        followers: list[Window] = []
        if self._buffer is not None:
            followers = self._lead(memory)
            buffer, self._buffer = self._buffer, None
            if memory.numel():
                self._storage._write(buffer, self._start, memory.numel())
            else:
                buffer.release()
        self._storage.written()
        for follower in followers:
            follower.version = self._storage.version

    def _lead(self, memory: torch.Tensor) -> list[Window]:
        """Copy what is about to be written to the followers that have had every write so far; returns them."""
        followers = self._storage.present_followers()
        for follower in followers:
            follower.wait()
            follower.version = None
            first = max(self._start, follower._start)
            end = min(self._start + memory.numel(), follower._start + follower._memory.numel())
            if first < end:
                theirs = follower._memory[first - follower._start : end - follower._start]
                theirs.copy_(memory[first - self._start : end - self._start])
        return followers

    def close(self) -> None:
        """Give the memory back without writing. A read under way is waited for: its buffer is not free before."""
        if not self.open:
            return
        self.open = False
        self._memory = None
        ticket, self._ticket = self._ticket, None
        buffer, self._buffer = self._buffer, None
        if ticket is not None:
            try:
                ticket.wait()
            except StoreError:
                pass  # whoever needed the values has waited for them, and knows
            except BaseException:  # Ctrl-C
                buffer.release_when_dropped()
                raise
        if buffer is not None:
            buffer.release()
