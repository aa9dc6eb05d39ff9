"""The directories of a store: in each a scratch directory of this job, a data file, and the space in that file."""

from __future__ import annotations

import logging
import os
import shlex
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from zinf_fx.errors import StoreError
from zinf_fx.native.engine import BLOCK, DEPTH, HINTS, Engine
from zinf_fx.runtime.disk.data_file import AdoptedFile, DataFile
from zinf_fx.runtime.disk.ownership import begin
from zinf_fx.runtime.disk.probe import working_engine
from zinf_fx.runtime.disk.read_only import ReadOnlyFile
from zinf_fx.runtime.disk.scratch import Scratch, data_name, orphans
from zinf_fx.runtime.memory.freelist import Space
from zinf_fx.sizes import PAGE, blocks, in_words

log = logging.getLogger(__name__)

SMALLEST_STEP, LARGEST_STEP = 4 << 20, 256 << 20


class Volume(DataFile):
    """A data file that grows in a scratch directory of its own, and the engine that moves its bytes.

    Attributes:
        engine: of the device.
        refused: the providers that don't work here, and why.

    Args:
        directory: an existing, writable directory.
        names: providers to try, best first.
        start: makes the engine for a device (its st_dev) and a provider, or returns the one that is there.

    Raises:
        StoreError: the directory can't be used. Nothing is left behind.
    """

    def __init__(self, directory: Path, names: tuple[str, ...], start: Callable[[int, str], Engine]) -> None:
        super().__init__(Scratch(directory), data_name(0))
        self.directory = directory
        self._growing = threading.Lock()
        self._space = Space()
        self._adopted = 0
        self._first_page = 0  # its bytes
        try:
            self.device = os.stat(directory).st_dev
            self.engine, self.refused = working_engine(self._scratch, names, lambda name: start(self.device, name))
            self._open(self._scratch.create(self.path.name), self.engine)
        except BaseException:
            self.detach()
            self.remove()
            raise
        with suppress(StoreError):  # the directory can be written to, and not read
            if left := orphans(directory):
                how = f"zinf-fx clean {shlex.quote(str(directory))}"
                text = "jobs that were killed left scratch directories (%d): `%s` frees their space"
                log.warning(text, len(left), how)

    @property
    def in_use(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  (read alone)
        """Bytes taken."""
        return self._space.in_use

    def identify(self) -> None:
        """Let the file, which is empty yet, say in a page of its own whose it is: see [Note: proofs]."""
        self._first_page = PAGE

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

    def adopt(self, path: Path, content: Iterable[range]) -> AdoptedFile:
        """A data file of another store on this device, which a checkpoint has under the name `path` for some bytes of
        it: see [Note: adopted files]. Raises: StoreError; nothing is left behind."""
        self._adopted += 1
        return AdoptedFile(self._scratch, data_name(self._adopted), self.engine, path, content)

    def remove(self) -> None:
        """Closes and deletes the files, once the engine is closed or they are detached from it. Of a data file that has
        another name, all is given back that is not there for that. In a forked child, only closes them."""
        super().remove()
        self.unlink()

    def unlink(self) -> None:
        """Deletes the files, whose descriptors stay open."""
        self._scratch.remove()

    def _grow(self, capacity: int) -> None:
        """Reserves in steps that follow the file's size, because every step is a system call that holds up I/O."""
        first = 0 if self.size else self._first_page
        needed = first + capacity - self._space.free_before(self.size)
        step = blocks(max(needed, min(max(self.size, SMALLEST_STEP), LARGEST_STEP)))
        for nbytes in (step, needed) if step > needed else (needed,):
            try:
                os.posix_fallocate(self.descriptor, self.size, nbytes)
                if first:
                    begin(self.descriptor, self._scratch.path.name)
            except OSError as error:
                os.ftruncate(self.descriptor, self.size)  # a failed reservation may leave a part of itself
                if nbytes > needed:
                    continue
                raise self._no_room(needed, error) from error
            self._space.extend(self.size + first, nbytes - first)
            self.size += nbytes
            return

    def _no_room(self, needed: int, error: OSError) -> StoreError:
        try:
            status = os.fstatvfs(self.descriptor)
            free = in_words(status.f_bavail * status.f_frsize)
        except OSError as unknown:
            free = f"unknown how much ({unknown.strerror})"
        return StoreError(
            "allocate",
            self.path,
            f"{in_words(needed)} more asked for, {free} free on the file system; "
            + HINTS.get(error.errno or 0, "the space can't be reserved"),
            offset=self.size,
            length=needed,
            errno=error.errno,
        )


class Volumes:
    """Several volumes, and one I/O thread and queue per device. They are given back by `close`, or nothing is made.

    Attributes:
        files: their data files by number, and behind them those of other stores that this one goes on with.
        others: files of somebody else that the engines read from.

    Raises: StoreError when a directory can't be used.
    """

    def __init__(
        self, directories: tuple[Path, ...], names: tuple[str, ...], depth: int = DEPTH, block: int = BLOCK
    ) -> None:
        self.pid = os.getpid()
        self.engines: dict[tuple[int, str], Engine] = {}
        self.all: list[Volume] = []
        self.files: list[DataFile] = []
        self._depth, self._block = depth, block
        self.others: weakref.WeakSet[ReadOnlyFile] = weakref.WeakSet()
        try:
            for directory in directories:
                self.all.append(Volume(directory, names, self.engine))
                self.files.append(self.all[-1])
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
            for file in (*self.files, *self.others):
                file.detach()
            for engine in self.engines.values():
                engine.close()
        except BaseException:  # Ctrl-C while a device is stuck: what is under way still uses the descriptors
            for volume in self.all:
                volume.unlink()
            raise
        self.remove()

    def remove(self) -> None:
        """Closes and deletes all files, from which everything is detached. In a forked child, only closes them."""
        for file in reversed(self.files):
            file.remove()


_of_this_process: weakref.WeakSet[Volumes] = weakref.WeakSet()


def _after_fork() -> None:
    """A child that outlives its parent must neither hold the parent's lock nor its disk space."""
    for volumes in list(_of_this_process):
        volumes.remove()


os.register_at_fork(after_in_child=_after_fork)
