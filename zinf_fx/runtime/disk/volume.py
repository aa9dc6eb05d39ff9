"""The directories of a store: in each a scratch directory of this job, a data file, and the space in that file."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from zinf_fx.errors import StoreError
from zinf_fx.native.engine import BLOCK, DEPTH, HINTS, Engine, File
from zinf_fx.runtime.disk.links import Links
from zinf_fx.runtime.disk.probe import reopen, working_engine
from zinf_fx.runtime.disk.read_only import ReadOnlyFile
from zinf_fx.runtime.disk.scratch import Scratch
from zinf_fx.runtime.memory.freelist import Space, round_up
from zinf_fx.sizes import PAGE

DATA = "data-0"
SMALLEST_STEP, LARGEST_STEP = 4 << 20, 256 << 20


class Volume:
    """A data file at `path`, on one device, and the engine that moves its bytes.

    Attributes:
        file: for transfers.
        refused: the providers that don't work here, and why.
        links: other names of the data file, whose bytes stay when the volume is gone.

    Args:
        directory: an existing, writable directory.
        names: providers to try, best first.
        start: makes the engine for a device (its st_dev) and a provider, or returns the one that is there.

    Raises:
        StoreError: the directory can't be used. Nothing is left behind.
    """

    def __init__(self, directory: Path, names: tuple[str, ...], start: Callable[[int, str], Engine]) -> None:
        self.directory = directory
        self.size = 0
        """Bytes of the data file."""
        self._growing = threading.Lock()
        self._space = Space()
        self._descriptors: list[int] = []
        self.file: File | None = None
        self.links = Links()
        self._scratch = Scratch(directory)
        self.path = self._scratch.path / DATA
        try:
            self.device = os.stat(directory).st_dev
            self.engine, self.refused = working_engine(self._scratch, names, lambda name: start(self.device, name))
            self._plain = self._scratch.create(DATA)
            self._descriptors.append(self._plain)
            direct = reopen(self._plain, self.engine.provider)
            self._descriptors.append(direct)
            self.file = self.engine.attach(direct, self.path, alignment=PAGE)
        except BaseException:
            self.detach()
            self.remove()
            raise

    @property
    def in_use(self) -> int:
        """Bytes taken."""
        return self._space.in_use

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` bytes (a multiple of 4096) that are reserved on the device, now.

        Raises:
            StoreError: no space; with the bytes asked for and the bytes free.
        """
        with self._growing:
            offset = self._space.take(nbytes, PAGE)
            if offset is None:
                self._grow(nbytes)
                offset = self._space.take(nbytes, PAGE)
                assert offset is not None, "the file grew, and yet there is no room in it"
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Gives back what `take` returned. Safe in a finalizer."""
        self._space.give(offset, nbytes)

    @property
    def descriptor(self) -> int:
        """Of the data file, without direct I/O."""
        return self._plain

    def gone_links(self) -> set[Path]:
        """Those of `links` that the data file doesn't have any more."""
        return self.links.gone(self._plain)

    def detach(self) -> None:
        """Waits for what is under way. A forked child leaves it alone."""
        if self.file is not None:
            self.file.detach()

    def remove(self) -> None:
        """Closes and deletes the files, once the engine is closed or they are detached from it. Of a data file that has
        another name, all is given back that is not there for that. In a forked child, only closes them."""
        if self._descriptors and self._scratch.is_ours:
            self.links.give_back_others(self._plain)
        while self._descriptors:
            os.close(self._descriptors.pop())
        self.unlink()

    def unlink(self) -> None:
        """Deletes the files, whose descriptors stay open."""
        self._scratch.remove()

    def _grow(self, capacity: int) -> None:
        """Reserves in steps that follow the file's size, because every step is a system call that holds up I/O."""
        needed = capacity - self._space.free_before(self.size)
        step = round_up(max(needed, min(max(self.size, SMALLEST_STEP), LARGEST_STEP)), PAGE)
        for nbytes in (step, needed) if step > needed else (needed,):
            try:
                os.posix_fallocate(self._plain, self.size, nbytes)
            except OSError as error:
                os.ftruncate(self._plain, self.size)  # a failed reservation may leave a part of itself
                if nbytes > needed:
                    continue
                raise self._no_room(needed, error) from error
            self._space.extend(self.size, nbytes)
            self.size += nbytes
            return

    def _no_room(self, needed: int, error: OSError) -> StoreError:
        try:
            status = os.fstatvfs(self._plain)
            free = f"{status.f_bavail * status.f_frsize} bytes"
        except OSError as unknown:
            free = f"an unknown number of bytes ({unknown.strerror})"
        return StoreError(
            "allocate",
            self.path,
            f"{needed} more bytes asked for, {free} free on the file system; "
            + HINTS.get(error.errno or 0, "the space can't be reserved"),
            offset=self.size,
            length=needed,
            errno=error.errno,
        )


class Volumes:
    """Several volumes, and one I/O thread and queue per device. They are given back by `close`, or nothing is made.

    Attributes:
        others: files of somebody else that the engines read from.

    Raises: StoreError when a directory can't be used.
    """

    def __init__(
        self, directories: tuple[Path, ...], names: tuple[str, ...], depth: int = DEPTH, block: int = BLOCK
    ) -> None:
        self.pid = os.getpid()
        self.engines: dict[tuple[int, str], Engine] = {}
        self.all: list[Volume] = []

        self._depth, self._block = depth, block
        self.others: weakref.WeakSet[ReadOnlyFile] = weakref.WeakSet()
        try:
            for directory in directories:
                self.all.append(Volume(directory, names, self.engine))
        except BaseException:
            self.close()
            raise
        _of_this_process.add(self)

    def engine(self, device: int, provider: str) -> Engine:
        """The engine for a device (its st_dev) and a provider."""
        key = (device, provider)
        if key not in self.engines:
            self.engines[key] = Engine(provider, depth=self._depth, block=self._block)
        return self.engines[key]

    def close(self) -> None:
        """Everything in order: requests, threads, descriptors, files, locks. A forked child only closes descriptors."""
        try:
            for file in (*self.all, *self.others):
                file.detach()
            for engine in self.engines.values():
                engine.close()
        except BaseException:  # Ctrl-C while a device is stuck: what is under way still uses the descriptors
            for volume in self.all:
                volume.unlink()
            raise
        for volume in self.all:
            volume.remove()


_of_this_process: weakref.WeakSet[Volumes] = weakref.WeakSet()


def _after_fork() -> None:
    """A child that outlives its parent must neither hold the parent's lock nor its disk space."""
    for volumes in list(_of_this_process):
        for volume in volumes.all:
            volume.remove()


os.register_at_fork(after_in_child=_after_fork)
