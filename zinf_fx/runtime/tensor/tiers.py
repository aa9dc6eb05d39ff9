"""The memories of one job: the host arena, those of devices, and the store on disk."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import ClassVar, Protocol

from zinf_fx.config import Config
from zinf_fx.errors import StoreError
from zinf_fx.interrupts import taking
from zinf_fx.native.engine import HINTS
from zinf_fx.plan.schedule import CHUNKS, MemoryRegions
from zinf_fx.runtime.disk.filesystem import note_memory
from zinf_fx.runtime.disk.generation import Generation
from zinf_fx.runtime.disk.scratch import make_default
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.memory.arena import Arena, Buffer, DeviceArena
from zinf_fx.runtime.memory.device import Device
from zinf_fx.runtime.memory.process import hold_little, memory_limit
from zinf_fx.runtime.memory.transfers import Counters, Ticket
from zinf_fx.runtime.tensor.write_queue import WriteQueue
from zinf_fx.sizes import blocks


class BackgroundWork(Protocol):
    """Work that changes stored tensors between the operators of graphs. Whoever looks at one of them waits for it."""

    @property
    def asks(self) -> bool:
        """Whether it is the work itself that asks."""
        ...

    def advance(self) -> None:
        """Do what can be done without waiting."""

    def settle(self, keys: Collection[int]) -> None:
        """Wait until the storages of these keys have their final values; nothing when the work itself asks."""

    def finish(self) -> bool:
        """Do all that is left. Returns whether there was any; nothing is done when the work itself asks."""
        ...


class Ahead(Protocol):
    """Memory with what the background will need, and does without."""

    def advance(self) -> None:
        """Start reading more of it, if there is room."""

    def close(self) -> bool:
        """Give the memory back. Returns whether there was any; nothing is done when it is itself that asks."""
        ...


class Tiers:
    """The host arena and the store that a set of stored tensors share.

    Tensors with the same store, options of the store, and host budget share one; it lives as long as any of them, and
    its scratch directory goes with it.
    """

    _open: ClassVar[weakref.WeakValueDictionary[tuple, Tiers]] = weakref.WeakValueDictionary()
    _open_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pid = os.getpid()
        limit = memory_limit()
        self.host = Arena("host", config.host_memory or limit.nbytes)
        self._is_limited = limit.by_group
        self.counters = Counters()
        self.background: BackgroundWork | None = None
        self._ahead: weakref.ref[Ahead] | None = None
        self._on_devices: dict[Device, DeviceArena] = {}
        self.planned_peak = 0
        self.chunk_elements: int | None = None
        """Of a chunk of an optimizer's step, for which there is room in the region; None before the first plan."""
        self.chunk_count = CHUNKS
        """How many chunks that room is for."""
        self._chunks = range(0)  # of the region, what is for an optimizer's step
        self._here = threading.local()  # what of it this thread allocates in, as `room`
        self._store: Store | None = None
        self.generations: list[Generation] = []
        """What of the store checkpoints keep as it was."""
        self.writes = WriteQueue(self.counters)
        self._lock = self.writes.lock
        self.chunk_writes = WriteQueue(self.counters, self._lock)
        """Those from the room for chunks, where a plan has it for nothing else: they go on while others come and go."""
        self._queues = self.writes, self.chunk_writes
        self._one_moves = threading.RLock()

    @classmethod
    def of(cls, config: Config) -> Tiers:
        """Return the open tiers of this configuration, or new ones."""
        key = (config.stores, config.host_memory, config.checksum, config.strict_direct)
        with cls._open_lock:
            tiers = cls._open.get(key)
            if tiers is None:
                tiers = cls._open[key] = cls(config)
        if tiers._is_limited or config.host_memory is not None or config.device_memory is not None:
            hold_little()
        return tiers

    @classmethod
    def _after_fork(cls) -> None:
        """A child has no use for its parent's tiers, and opens its own. Nobody in it would release the lock."""
        cls._open, cls._open_lock = weakref.WeakValueDictionary(), threading.Lock()

    @property
    def of_this_process(self) -> bool:
        """False in a process made by fork: it has neither the memory nor the I/O threads."""
        return os.getpid() == self.pid

    def check_process(self) -> None:
        """Raises: StoreError in a process made by fork, before it waits for what only the parent can do."""
        if os.getpid() != self.pid:
            raise StoreError("use", "stored tensor", HINTS[errno.ECHILD], errno=errno.ECHILD)

    @property
    def store(self) -> Store:
        """The NVMe tier; its scratch directory is made on first use."""
        with self._lock:
            if self._store is None:
                make_default(self.config)
                for directory in self.config.stores:
                    note_memory(directory)
                self._store = Store(
                    self.config.stores, checksum=self.config.checksum, strict_direct=self.config.strict_direct
                )
            return self._store

    @property
    def store_in_use(self) -> Store | None:
        """The NVMe tier if anything was ever placed on it."""
        return self._store

    @property
    def device_arenas(self) -> Mapping[Device, DeviceArena]:
        """The regions that plans have on devices with memory of their own, by the device."""
        return self._on_devices

    def plan(self, regions: MemoryRegions, peak: int, devices: Iterable[Device] = ()) -> None:
        """Set the regions of a plan apart before its first step, and measure anew how much of the arenas is used.

        The plan takes `peak` bytes of the host arena at most, and computes on `devices` with memory of their own. Plans
        share the regions: one is used at a time.

        Raises: StoreError when a device has no room for its region.
        """
        if self.ahead is not None:
            self.ahead.close()
        with self._lock:
            self.drain()
            self.host.reserve(regions.host)
            for device in devices:
                self._reserve_on(device, regions.device)
            if regions.chunks > self._chunks.stop:
                self._chunks, self.chunk_elements = range(regions.chunks), regions.chunk_elements
                self.chunk_count, self.chunk_writes.most = regions.chunk_count, regions.chunks
            self.planned_peak = max(self.planned_peak, peak)
            self.host.trim()
            self.host.restart_peak()

    def _reserve_on(self, device: Device, nbytes: int) -> None:
        arena = self._on_devices.get(device)
        if nbytes > (0 if arena is None else arena.capacity):
            # What is allocated in the smaller one stays there, and keeps it; else its memory goes before more is taken.
            del arena
            self._on_devices.pop(device, None)
            self._on_devices[device] = DeviceArena(device, nbytes, self.counters)
        elif arena is not None:
            arena.restart_peak()

    @property
    def ahead(self) -> Ahead | None:
        """What is read for the work that comes next; whoever does that holds it."""
        return self._ahead and self._ahead()

    @ahead.setter
    def ahead(self, ahead: Ahead | None) -> None:
        self._ahead = None if ahead is None else weakref.ref(ahead)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to `advance`."""
        return self.background is not None or self.ahead is not None

    def advance(self) -> None:
        """Have the background go on between operators or, when it is done, have read what comes next."""
        if (work := self.background or self.ahead) is not None:
            work.advance()

    def moving(self) -> AbstractContextManager[None]:
        """Open a block in which eager code moves the elements of one tensor through memory that is allocated for that.
        One thread at a time is in such a block. The step in the background, which a block may wait for, waits for none.
        See [Note: threads]."""
        self.check_process()
        background = self.background
        return nullcontext() if background is not None and background.asks else taking(self._one_moves)

    @contextmanager
    def stepping(self, part: range | None = None) -> Iterator[None]:
        """Open a block in which what is allocated is an optimizer's: in the room that its chunks have in the region.

        Or in part of it, once nothing is written from there any more: buffers in the gaps between writes leave gaps.
        """
        room = self._chunks if part is None else self._planned(part)
        if part is not None:
            for queue in self._queues:
                queue.vacate(partial(self.host.lies_in, room))
        before, self._here.room = getattr(self._here, "room", None), room or None
        try:
            yield
        finally:
            self._here.room = before

    @property
    def chunk_room(self) -> int:
        """How many bytes of the region are for an optimizer's chunks."""
        return self._chunks.stop

    def is_vacant(self, part: range) -> bool:
        """Whether nothing is written from a part of the room for chunks, so that `stepping` would not wait."""
        return all(queue.is_vacant(partial(self.host.lies_in, self._planned(part))) for queue in self._queues)

    @property
    def is_writing(self) -> bool:
        """Whether anything is on its way to the store."""
        return not all(queue.idle for queue in self._queues)

    def write(self, ticket: Ticket, buffer: Buffer, owner: object) -> None:
        """See `WriteQueue.add`."""
        apart = self.chunk_count > CHUNKS and self.host.lies_in(self._chunks, buffer)
        (self.chunk_writes if apart else self.writes).add(ticket, buffer, owner)

    def _planned(self, part: range) -> range:
        """Return what of a part of the room for chunks is planned."""
        return range(part.start, min(part.stop, self._chunks.stop))

    def allocate(self, nbytes: int, offset: int | None = None) -> Buffer:
        """Allocate a buffer of the host arena. Where there is no room, wait for writes to the store and for background
        work, and give up what is read ahead of that.

        `offset` is where in the region it is planned. It lies elsewhere if somebody has that place: another plan, or a
        graph that runs out of turn.

        Raises: StoreError when there is no room yet after that, or a write failed.
        """
        room = getattr(self._here, "room", None)
        if offset is not None:
            room = range(offset, offset + blocks(nbytes))
        while True:
            background = self.background
            with self._lock:
                # The room for chunks has the writes of an earlier chunk in it; for a tile's place nobody waits.
                waits = offset is None
                if room is not None:
                    if (buffer := self._allocate_in(room, nbytes, waits)) is not None:
                        return buffer
                    self.counters.displaced += 1
                try:
                    return self.host.allocate(nbytes)
                except StoreError:
                    if not any(self._queues) and background is None and self.ahead is None:
                        raise
                if (queue := next(filter(None, self._queues), None)) is not None:
                    queue.retire()
                    continue
            # Not under the lock, which the background's own buffers take.
            if background is not None and background.finish():
                continue
            if (ahead := self.ahead) is None or not ahead.close():
                return self.host.allocate(nbytes)

    def allocate_at_once(self, nbytes: int, offset: int | None = None) -> Buffer | None:
        """Allocate a buffer in the planned place, or without one in any, if that is free; else return None."""
        with self._lock:
            if offset is not None:
                return self._allocate_in(range(offset, offset + blocks(nbytes)), nbytes, waits=False)
            try:
                return self.host.allocate(nbytes)
            except StoreError:
                return None

    def _allocate_in(self, room: range, nbytes: int, waits: bool) -> Buffer | None:
        buffer = self.host.allocate_in(room, nbytes)
        for queue in self._queues:
            while buffer is None and queue and (waits or queue.first_is_done):
                queue.retire()
                buffer = self.host.allocate_in(room, nbytes)
        if buffer is not None:
            self.counters.placed += 1
        return buffer

    def release_generations(self) -> None:
        """Give the store back what nobody has a link to any more."""
        for generation in [generation for generation in self.generations if generation.is_gone]:
            self.generations.remove(generation)
            generation.release()

    def limit_writes(self, nbytes: int) -> None:
        """Wait until at most `nbytes` are on their way to the store."""
        self.check_process()
        self.writes.limit(nbytes)

    def drain(self) -> None:
        """Wait for every write under way. Raises: StoreError of the first that failed, after all have ended."""
        self.check_process()
        try:
            self.writes.drain()
        finally:
            self.chunk_writes.drain()


os.register_at_fork(after_in_child=Tiers._after_fork)


def drain_after(error: BaseException, all_tiers: Iterable[Tiers]) -> None:
    """Wait for every write under way, after `error`, which gets notes of other failures."""
    for tiers in all_tiers:
        try:
            tiers.drain()
        except StoreError as failed:
            if str(failed) != str(error):
                error.add_note(f"and then: {failed}")
