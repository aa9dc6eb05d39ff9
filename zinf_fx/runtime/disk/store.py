"""The store: extents of scratch files on fast devices, read and written asynchronously."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.native.engine import BLOCK, DEPTH, HINTS, READ, WRITE, IoCounters, PageSums
from zinf_fx.runtime.disk.data_file import AdoptedFile, DataFile
from zinf_fx.runtime.disk.measure import weights_of
from zinf_fx.runtime.disk.probe import candidates
from zinf_fx.runtime.disk.read_only import ReadOnlyFile
from zinf_fx.runtime.disk.stripes import UNIT, Place, Turns, runs
from zinf_fx.runtime.disk.volume import Volume, Volumes
from zinf_fx.runtime.memory.transfers import Ticket, all_started, joined
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.sizes import PAGE, blocks

log = logging.getLogger(__name__)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Extent:
    """A piece of the store.

    Attributes:
        nbytes: as asked for; `capacity` is what is reserved, a multiple of 4096.
        unit: bytes that lie together; the i-th so many are at `places[i]`.
        generation: unlike that of any other extent of the store.
        sums: the checksums of its pages, if the store keeps any.
    """

    nbytes: int
    capacity: int
    unit: int
    places: tuple[Place, ...]
    generation: int
    sums: PageSums | None = field(compare=False, repr=False)

    @property
    def offset(self) -> int:
        """Where its first byte is in the data file that has it."""
        return self.places[0].offset


class Store:
    """Extents of files in scratch directories of their own, below one directory or several on different devices.

    A scratch directory is locked while the store lives, and removed by `close`, when the store is collected, or when
    the interpreter exits. A process made by fork can't use its parent's store, and never removes it.

    Requests are asynchronous and independent: no order is promised between requests that overlap in the store or in
    memory. Whoever issues them waits for the first before it starts the second.

    Every device has an I/O thread and a queue. On several volumes, extents larger than 4 MiB are striped, and smaller
    ones take turns, in proportion to what each device moves per second.

    With checksums, a read fails whose bytes are not those written last: flipped, stale, or another page's. Pages that
    were never written have undefined values, and no checksum. What is written must not change until the ticket is done.

    Args:
        directory: an existing, writable directory on the device to use, or several.
        provider: how bytes are moved: "libaio" (kernel AIO through libaio), "aio" (kernel AIO by direct system calls),
            "threads" (threads with direct I/O), "buffered" (threads through the page cache), or "auto": the one named
            by the environment variable ZINF_IO_PROVIDER, else the first of these that works in `directory`.
        strict_direct: refuse to fall back to the page cache.
        checksum: keep one crc32c per 4096 bytes, in memory (1 MiB for 1 GiB of the store), and compare it at each read.
        weights: of the directories, for striping. None: measured (`zinf_fx.runtime.disk.measure`).
        depth, block: full blocks under way at a time on a device, and their bytes.

    Raises:
        ConfigError: an unknown provider, or a directory named twice.
        StoreError: a directory is missing, is no directory, is read-only or full, or no provider works in it. Nothing
            is left behind.
    """

    def __init__(
        self,
        directory: Path | str | Sequence[Path | str],
        *,
        provider: str = "auto",
        strict_direct: bool = False,
        checksum: bool = True,
        weights: Sequence[float] | None = None,
        depth: int = DEPTH,
        block: int = BLOCK,
    ) -> None:
        names = candidates(provider, strict_direct)
        given = [directory] if isinstance(directory, (str, os.PathLike)) else list(directory)
        self.directories = tuple(Path(path).absolute() for path in given)
        if not self.directories or len({path.resolve() for path in self.directories}) < len(self.directories):
            raise ConfigError(f"store={list(map(str, self.directories))} needs one directory or several different ones")
        self.checksum = checksum
        self._live: dict[int, int] = {}  # by the generation of an extent, bytes of it that were not given back
        self._generations = itertools.count(1)
        self._resources = Volumes(self.directories, names, depth, block)
        self._volumes = self._resources.all
        for volume in self._volumes:
            volume.identify()
        try:
            self._turns = Turns(weights or weights_of([(v.directory, v.device) for v in self._volumes]))
        except BaseException:
            self._resources.close()
            raise
        if len(self._volumes) > 1:
            total = sum(self._turns.weights)
            shares = zip(self.directories, self._turns.weights, strict=True)
            log.info(
                "store striped over %s", ", ".join(f"{directory} {weight / total:.0%}" for directory, weight in shares)
            )
        self._close = weakref.finalize(self, self._resources.close)

    def allocate(self, nbytes: int) -> Extent:
        """Reserves space for `nbytes` bytes on the device, now, so that no later write can run out of it.

        Raises:
            StoreError: no space on any volume; with the bytes asked for and the bytes free.
        """
        assert nbytes >= 0, f"an extent of {nbytes} bytes"
        self._check_usable("allocate")
        capacity = blocks(max(nbytes, 1))
        unit = min(UNIT, capacity) if len(self._volumes) > 1 else capacity
        places = self._place(capacity, unit)
        generation = next(self._generations)
        sums = PageSums(capacity // PAGE, generation) if self.checksum else None
        self._live[generation] = capacity
        return Extent(nbytes, capacity, unit, places, generation, sums)

    def adopt(self, path: Path, content: Iterable[range]) -> int:
        """Go on with a data file of another store, of which a checkpoint has some bytes, whole pages, under the name
        `path`: see [Note: adopted files]. Returns its number, until `part_with_unused`.

        Raises: StoreError where it is this store's own already, is gone, lies on no volume's device, or may not have
        one more name; nothing is changed then.
        """
        self._check_usable("adopt a data file")
        try:
            info = os.stat(path)
        except OSError as error:
            raise StoreError("adopt", path, "it can't be looked at", errno=error.errno) from error
        if any(file.is_same(info) for file in self.files):
            raise StoreError("adopt", path, "it is a data file of this store already")
        for volume in self._volumes:
            if volume.device == info.st_dev:
                self.files.append(volume.adopt(path, content))
                return len(self.files) - 1
        raise StoreError("adopt", path, "it is on another device than the store")

    def adopted(self, nbytes: int, unit: int, places: tuple[Place, ...], sums: PageSums) -> Extent:
        """Pages of adopted files as an extent, whose i-th `unit` bytes are at `places[i]`, and which have these
        checksums."""
        capacity = blocks(nbytes)
        self._live[sums.generation] = capacity
        for run in runs(places, unit, 0, capacity):
            file = self.files[run.volume]
            assert isinstance(file, AdoptedFile)
            file.take_over(run.nbytes)
        return Extent(nbytes, capacity, unit, places, sums.generation, sums if self.checksum else None)

    def new_sums(self, nbytes: int) -> PageSums:
        """The checksums of an extent that is to be."""
        return PageSums(blocks(nbytes) // PAGE, next(self._generations))

    def part_with_unused(self) -> None:
        """Close the adopted files of which no extent has anything."""
        for file in self.files[len(self._volumes) :]:
            if not file.in_use:
                file.detach()
                file.remove()

    def free(self, extent: Extent) -> None:
        """Gives an extent's space back to the store. No request for it may be under way. Safe in a finalizer."""
        assert extent.generation in self._live, f"{extent} is not allocated, or was freed before"
        self.give_back(extent, 0, extent.capacity)

    def give_back(self, extent: Extent, start: int, nbytes: int) -> None:
        """Free some pages of an extent: see `free`. One thread at a time gives back those of an extent."""
        left = self._live[extent.generation] - nbytes
        assert left >= 0, f"more of {extent} was given back than it has"
        if left:
            self._live[extent.generation] = left
        else:
            del self._live[extent.generation]
        for run in runs(extent.places, extent.unit, start, nbytes):
            self.files[run.volume].give(run.offset, run.nbytes)
            if run.volume < len(self._volumes):
                self._turns.take_back(run.volume, run.nbytes)

    def read(self, extent: Extent, address: int, offset: int, nbytes: int, *, owner: object = None) -> Ticket:
        """Starts reading `nbytes` bytes of the extent from `offset` on into memory at `address`.

        Address and offset are multiples of 4096. `nbytes` is rounded up to it, in memory too, where buffers have room
        because their sizes are, too. The memory must stay until the ticket is done; `owner` is an object to keep alive
        for that long.
        """
        return self._start(READ, extent, address, offset, nbytes, owner)

    def write(self, extent: Extent, address: int, offset: int, nbytes: int, *, owner: object = None) -> Ticket:
        """Starts writing memory at `address` into the extent; the same rules as `read`."""
        return self._start(WRITE, extent, address, offset, nbytes, owner)

    def open_read_only(self, path: Path) -> ReadOnlyFile:
        """A file of somebody else, to be read by this store's engines. Raises: StoreError."""
        self._check_usable("open a file")
        file = ReadOnlyFile(path, self.provider, self._resources.engine)
        self._resources.others.add(file)
        return file

    def close(self) -> None:
        """Finishes what is under way and removes the scratch directory. In a forked child: nothing. Idempotent."""
        self._close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def volumes(self) -> Sequence[Volume]:
        """The volumes of the directories, in order."""
        return self._volumes

    @property
    def files(self) -> list[DataFile]:
        """The data files by their numbers: those of the volumes, and then those that were adopted."""
        return self._resources.files

    @property
    def path(self) -> Path:
        """The first data file."""
        return self._volumes[0].path

    @property
    def provider(self) -> str:
        """What moves the bytes (of the first volume)."""
        return self._volumes[0].engine.provider

    @property
    def refused(self) -> dict[str, str]:
        """Providers that were tried before `provider`, and why they don't work here."""
        return self._volumes[0].refused

    @property
    def in_use(self) -> int:
        """Bytes of allocated extents."""
        return sum(file.in_use for file in self.files)

    def counters(self) -> IoCounters:
        """All counters at one moment, those of several devices added up."""
        return sum((engine.counters() for engine in self._resources.engines.values()), IoCounters())

    def _place(self, capacity: int, unit: int) -> tuple[Place, ...]:
        """Places for an extent on the volumes that have room: one that is full is left out."""
        sizes = [min(unit, capacity - start) for start in range(0, capacity, unit)]
        usable = list(range(len(self._volumes)))
        while True:
            dealt = self._turns.deal(sizes, usable)
            try:
                return self._take(sizes, dealt)
            except StoreError as error:
                for volume, nbytes in zip(dealt, sizes, strict=True):
                    self._turns.take_back(volume, nbytes)
                full = [v for v in usable if str(self._volumes[v].path) == error.path]
                if error.errno not in FULL or not full or len(usable) == 1:
                    raise
                usable.remove(full[0])

    def _take(self, sizes: list[int], dealt: list[int]) -> tuple[Place, ...]:
        """Space for each piece on its volume, consecutive on each. Raises: StoreError; nothing is taken then."""
        needed: dict[int, int] = {}
        for volume, nbytes in zip(dealt, sizes, strict=True):
            needed[volume] = needed.get(volume, 0) + nbytes
        taken: dict[int, int] = {}
        try:
            for volume, nbytes in needed.items():
                taken[volume] = self._volumes[volume].take(nbytes)
        except StoreError:
            for volume, offset in taken.items():
                self._volumes[volume].give(offset, needed[volume])
            raise
        places = []
        for volume, nbytes in zip(dealt, sizes, strict=True):
            places.append(Place(volume, taken[volume]))
            taken[volume] += nbytes
        return tuple(places)

    def _start(self, operation: int, extent: Extent, address: int, offset: int, nbytes: int, owner: object) -> Ticket:
        length = blocks(nbytes)
        assert extent.generation in self._live, f"{extent} is not allocated"
        assert nbytes > 0, f"a transfer of {nbytes} bytes"
        assert offset >= 0 and offset % PAGE == 0, f"offset {offset} is not a multiple of {PAGE}"
        assert offset + length <= extent.capacity, f"{nbytes} bytes at {offset} exceed {extent}"
        assert address % PAGE == 0, f"address {address:#x} is not a multiple of {PAGE}"
        self._check_usable("use")
        tickets = all_started(
            self.files[run.volume].file.submit(
                operation,
                address + run.start - offset,
                run.offset,
                run.nbytes,
                owner,
                sums=extent.sums,
                first_page=run.start // PAGE,
            )
            for run in runs(extent.places, extent.unit, offset, length)
        )
        RECORDER.stored("fetch" if operation == READ else "write", length, tickets)
        return joined(tickets)

    def _check_usable(self, operation: str) -> None:
        if os.getpid() != self._resources.pid:
            raise StoreError(operation, self.path, HINTS[errno.ECHILD], errno=errno.ECHILD)
        if not self._close.alive:
            raise StoreError(operation, self.path, "the store is closed")
