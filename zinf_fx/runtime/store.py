"""The store: extents of a scratch file on a fast device, read and written asynchronously."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.native.engine import (
    BLOCK,
    DEPTH,
    HINTS,
    READ,
    WRITE,
    Counters,
    Engine,
    Fault,
    File,
    Ticket,
    direct_alignment,
    is_direct,
    provider_names,
)
from zinf_fx.runtime.buffers import PAGE, aligned_empty
from zinf_fx.runtime.freelist import Space, round_up
from zinf_fx.runtime.scratch import Scratch, reclaim

__all__ = ["Counters", "Extent", "Fault", "Store", "Ticket", "reclaim"]

log = logging.getLogger(__name__)

PROVIDER_VARIABLE = "ZINF_IO_PROVIDER"
DATA, PROBE = "data-0", "probe"
PROBE_BYTES = 16 * PAGE
SMALLEST_STEP, LARGEST_STEP = 4 << 20, 256 << 20

FATAL_FOR_EVERY_PROVIDER = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE}


@dataclass(frozen=True)
class Extent:
    """A piece of the store. `nbytes` as asked for, `capacity` as reserved: a multiple of the alignment."""

    offset: int
    nbytes: int
    capacity: int


class Store:
    """Extents of one file in a scratch directory of its own, below `directory`.

    The scratch directory is locked while the store lives, and removed by `close`, when the store is collected, or when
    the interpreter exits. A process made by fork can't use its parent's store, and never removes it.

    Requests are asynchronous and independent: no order is promised between requests that overlap in the store or in
    memory. Whoever issues them waits for the first before it starts the second.

    Args:
        directory: an existing, writable directory on the device to use.
        provider: how bytes are moved: "libaio" (kernel AIO through libaio), "aio" (kernel AIO by direct system calls),
            "threads" (threads with direct I/O), "buffered" (threads through the page cache), or "auto": the one named
            by the environment variable ZINF_IO_PROVIDER, else the first of these that works in `directory`.
        strict_direct: refuse to fall back to the page cache.
        depth, block: blocks under way at a time, and their bytes.

    Raises:
        ConfigError: an unknown provider.
        StoreError: the directory is missing, is no directory, is read-only or full, or no provider works in it. Nothing
            is left behind.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        provider: str = "auto",
        strict_direct: bool = False,
        depth: int = DEPTH,
        block: int = BLOCK,
    ) -> None:
        candidates = _candidates(provider, strict_direct)
        self.directory = Path(directory)
        self._growing = threading.Lock()
        self._space = Space()
        self._live: dict[int, int] = {}
        self._size = 0
        self._resources = _Resources(self.directory, candidates, depth, block)
        self._close = weakref.finalize(self, self._resources.close)

    def allocate(self, nbytes: int) -> Extent:
        """Reserves space for `nbytes` bytes on the device, now, so that no later write can run out of it.

        Raises:
            StoreError: no space; with the bytes asked for and the bytes free.
        """
        assert nbytes >= 0, f"an extent of {nbytes} bytes"
        self._check_usable("allocate")
        capacity = round_up(max(nbytes, 1), self.alignment)
        with self._growing:
            offset = self._space.take(capacity, self.alignment)
            if offset is None:
                self._grow(capacity)
                offset = self._space.take(capacity, self.alignment)
                assert offset is not None, "the file grew, and yet there is no room in it"
        self._live[offset] = capacity
        return Extent(offset, nbytes, capacity)

    def free(self, extent: Extent) -> None:
        """Gives an extent's space back to the store. No request for it may be under way. Safe in a finalizer."""
        assert self._live.get(extent.offset) == extent.capacity, f"{extent} is not allocated, or was freed before"
        del self._live[extent.offset]
        self._space.give(extent.offset, extent.capacity)

    def read(self, extent: Extent, address: int, offset: int, nbytes: int, *, owner: object = None) -> Ticket:
        """Starts reading `nbytes` bytes of the extent from `offset` on into memory at `address`.

        Address and offset are multiples of the alignment. `nbytes` is rounded up to it, in memory too, where buffers
        have room because their sizes are rounded up to 4096. The memory must stay until the ticket is done; `owner` is
        an object to keep alive for that long.
        """
        return self._start(READ, extent, address, offset, nbytes, owner)

    def write(self, extent: Extent, address: int, offset: int, nbytes: int, *, owner: object = None) -> Ticket:
        """Starts writing memory at `address` into the extent; the same rules as `read`."""
        return self._start(WRITE, extent, address, offset, nbytes, owner)

    def close(self) -> None:
        """Finishes what is under way and removes the scratch directory. In a forked child: nothing. Idempotent."""
        self._close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The data file."""
        return self._resources.scratch.path / DATA

    @property
    def provider(self) -> str:
        """What moves the bytes."""
        return self._resources.engine.provider

    @property
    def refused(self) -> dict[str, str]:
        """Providers that were tried before `provider`, and why they don't work here."""
        return dict(self._resources.refused)

    @property
    def alignment(self) -> int:
        """Bytes: what offsets and addresses are multiples of."""
        return PAGE

    @property
    def in_use(self) -> int:
        """Bytes of allocated extents."""
        return self._space.in_use

    @property
    def reserved(self) -> int:
        """Bytes of the data file."""
        return self._size

    @property
    def bytes_read(self) -> int:
        """Bytes that reads moved so far."""
        return self.counters().bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes that writes moved so far."""
        return self.counters().bytes_written

    @property
    def read_seconds(self) -> float:
        """Seconds during which at least one block was being read."""
        return self.counters().read_seconds

    @property
    def write_seconds(self) -> float:
        """Seconds during which at least one block was being written."""
        return self.counters().write_seconds

    def counters(self) -> Counters:
        """All counters at one moment."""
        return self._resources.engine.counters()

    def inject(self, fault: Fault) -> None:
        """Arms a fault in the engine, for tests."""
        self._resources.engine.inject(fault)

    def clear_faults(self) -> None:
        """Disarms every fault."""
        self._resources.engine.clear_faults()

    def _start(self, operation: int, extent: Extent, address: int, offset: int, nbytes: int, owner: object) -> Ticket:
        length = round_up(nbytes, self.alignment)
        assert self._live.get(extent.offset) == extent.capacity, f"{extent} is not allocated"
        assert nbytes > 0, f"a transfer of {nbytes} bytes"
        assert offset >= 0 and offset % self.alignment == 0, f"offset {offset} is not a multiple of {self.alignment}"
        assert offset + length <= extent.capacity, f"{nbytes} bytes at {offset} exceed {extent}"
        assert address % self.alignment == 0, f"address {address:#x} is not a multiple of {self.alignment}"
        self._check_usable("use")
        return self._resources.file.submit(operation, address, extent.offset + offset, length, owner)

    def _check_usable(self, operation: str) -> None:
        if os.getpid() != self._resources.pid:
            raise StoreError(operation, self.path, HINTS[errno.ECHILD], errno=errno.ECHILD)
        if not self._close.alive:
            raise StoreError(operation, self.path, "the store is closed")

    def _grow(self, capacity: int) -> None:
        """Reserves in steps that follow the file's size, because every step is a system call that holds up I/O."""
        needed = capacity - self._space.free_before(self._size)
        step = max(needed, min(max(self._size, SMALLEST_STEP), LARGEST_STEP))
        for nbytes in (step, needed) if step > needed else (needed,):
            try:
                os.posix_fallocate(self._resources.plain, self._size, nbytes)
            except OSError as error:
                os.ftruncate(self._resources.plain, self._size)  # a failed reservation may leave a part of itself
                if nbytes > needed:
                    continue
                raise self._no_room(needed, error) from error
            self._space.extend(self._size, nbytes)
            self._size += nbytes
            return

    def _no_room(self, needed: int, error: OSError) -> StoreError:
        try:
            status = os.fstatvfs(self._resources.plain)
            free = f"{status.f_bavail * status.f_frsize} bytes"
        except OSError as unknown:
            free = f"an unknown number of bytes ({unknown.strerror})"
        return StoreError(
            "allocate",
            self.path,
            f"{needed} more bytes asked for, {free} free on the file system; "
            + HINTS.get(error.errno or 0, "the space can't be reserved"),
            offset=self._size,
            length=needed,
            errno=error.errno,
        )


class _Resources:
    """What a store holds of the system. Apart from the store, so that it can be given back after the store is gone."""

    def __init__(self, directory: Path, candidates: tuple[str, ...], depth: int, block: int) -> None:
        self.pid = os.getpid()
        self.refused: dict[str, str] = {}
        self.plain: int = -1
        self.direct: int = -1
        self.file: File | None = None
        self.engine: Engine | None = None
        self.scratch = Scratch(directory)
        try:
            self.engine = self._choose(directory, candidates, depth, block)
            self.plain = self.scratch.create(DATA)
            self.direct = _reopen(self.plain, self.engine.provider)
            self.file = self.engine.attach(self.direct, self.scratch.path / DATA, alignment=PAGE)
        except BaseException:
            self.close()
            raise
        _of_this_process.add(self)

    def _choose(self, directory: Path, candidates: tuple[str, ...], depth: int, block: int) -> Engine:
        for provider in candidates:
            try:
                self._probe(provider)
                engine = Engine(provider, depth=depth, block=block)
            except StoreError as error:
                if error.errno in FATAL_FOR_EVERY_PROVIDER:
                    raise
                self.refused[provider] = str(error)
                continue
            level = logging.INFO if is_direct(provider) else logging.WARNING
            log.log(level, "store in %s: I/O by %s%s", directory, provider, self._reasons())
            return engine
        raise StoreError("open", directory, f"no I/O provider works here{self._reasons()}")

    def _reasons(self) -> str:
        return "".join(f"; not {name}: {reason}" for name, reason in self.refused.items())

    def _probe(self, provider: str) -> None:
        """Writes and reads back a file, because a file system may accept O_DIRECT at open and refuse it later."""
        path = self.scratch.path / PROBE
        engine = Engine(provider, depth=1)
        plain = direct = -1
        try:
            plain = self.scratch.create(PROBE)
            alignment = direct_alignment(plain) if is_direct(provider) else PAGE
            if alignment is None:
                raise StoreError("probe", path, "the file system says that it has no direct I/O")
            if alignment != PAGE:
                raise StoreError("probe", path, f"direct I/O needs an alignment of {alignment}, buffers have {PAGE}")
            direct = _reopen(plain, provider)
            written, back = aligned_empty(PROBE_BYTES), aligned_empty(PROBE_BYTES)
            written.copy_((written.new_ones(PROBE_BYTES).cumsum(0) % 251).to(written.dtype))
            back.zero_()
            file = engine.attach(direct, path, alignment=PAGE)
            try:
                file.submit(WRITE, written.data_ptr(), 0, PROBE_BYTES, written).wait()
                file.submit(READ, back.data_ptr(), 0, PROBE_BYTES, back).wait()
            finally:
                file.detach()
            if not written.equal(back):
                raise StoreError("probe", path, "the bytes read are not the bytes written", length=PROBE_BYTES)
        finally:
            engine.close()
            for fd in (direct, plain):
                if fd >= 0:
                    os.close(fd)
            self.scratch.unlink(PROBE)

    def close(self) -> None:
        """Everything in order: requests, thread, descriptors, files, lock. A forked child drops its descriptors."""
        if os.getpid() == self.pid:
            if self.file is not None:
                self.file.detach()
            if self.engine is not None:
                self.engine.close()
        self.drop_descriptors()
        self.scratch.remove()

    def drop_descriptors(self) -> None:
        """Closes this process's descriptors of the data file, and in a forked child the one of the lock."""
        plain, self.plain = self.plain, -1
        direct, self.direct = self.direct, -1
        for fd in (plain, direct):
            if fd >= 0:
                os.close(fd)
        if os.getpid() != self.pid:
            self.scratch.forget()


_of_this_process: weakref.WeakSet[_Resources] = weakref.WeakSet()


def _after_fork() -> None:
    """A child that outlives its parent must neither hold the parent's lock nor its disk space."""
    for resources in list(_of_this_process):
        resources.drop_descriptors()


os.register_at_fork(after_in_child=_after_fork)


def _reopen(fd: int, provider: str) -> int:
    """A second descriptor of the same file, for the provider. The first stays plain: posix_fallocate may have to write,
    and can't do that with O_DIRECT."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if is_direct(provider) else 0)
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    except OSError as error:
        path = os.readlink(f"/proc/self/fd/{fd}")
        raise StoreError("open", path, f"the file can't be opened for {provider}", errno=error.errno) from error


def _candidates(provider: str, strict_direct: bool) -> tuple[str, ...]:
    source = "provider"
    if provider == "auto":
        provider = os.environ.get(PROVIDER_VARIABLE, "auto")
        source = PROVIDER_VARIABLE
    names = provider_names()
    if provider not in ("auto", *names):
        raise ConfigError(f"unknown I/O provider {provider!r} in {source}; accepted: auto, {', '.join(names)}")
    chosen = names if provider == "auto" else (provider,)
    allowed = tuple(name for name in chosen if is_direct(name) or not strict_direct)
    if not allowed:
        raise ConfigError(f"strict_direct=True contradicts the I/O provider {provider!r}, which uses the page cache")
    return allowed
