"""The Python face of the native engine: files and tickets."""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass

from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.interrupts import held_back, let_through
from zinf_fx.native._engine import ffi, lib

log = logging.getLogger(__name__)

BLOCK = 4 << 20
"""Bytes of one transfer."""

DEPTH = 16
"""Transfers under way at a time. With 8, reads were 8 % and writes 18 % slower: checksums keep the thread busy."""

WAIT_SLICE = 0.25
"""Seconds after which a waiting thread looks for signals, so that Ctrl-C works while the device doesn't answer."""

STUCK_AFTER = 30.0
"""Seconds of waiting for one ticket after which a warning names it, again and again."""

_SWEPT_AT_LEAST = 64
"""Tickets that an engine holds before it looks which are over."""

READ, WRITE = lib.ZINF_READ, lib.ZINF_WRITE
OPERATIONS = {READ: "read", WRITE: "write"}

HINTS = {
    errno.EINVAL: "the device refused the alignment of offset, length or memory",
    errno.ENODATA: "the file ended before the requested bytes",
    errno.ENOSPC: "the file system is full; free space or choose another store directory",
    errno.EDQUOT: "the disk quota is used up; free space or choose another store directory",
    errno.EFBIG: "the file would exceed the limit on file sizes (`ulimit -f`, or the file system's own)",
    errno.EIO: "the device failed; the file accepts no more requests",
    errno.EBADMSG: "the bytes read are not the bytes written last: this page has another checksum",
    errno.ENODEV: "the device is gone",
    errno.ENXIO: "the device is gone",
    errno.ESTALE: "the network file system lost the file",
    errno.ECHILD: "a process made by fork can't use its parent's engine; open a store of its own there",
    errno.ESHUTDOWN: "the engine is closed",
}

SET_UP_HINTS = {
    errno.ENOSYS: "it is not installed, or the kernel doesn't have it",
    errno.EAGAIN: "the system's limit is reached: /proc/sys/fs/aio-max-nr for kernel AIO, `ulimit -u` for threads",
    errno.EPERM: "the system forbids it (a container's seccomp profile?)",
}


def provider_names() -> tuple[str, ...]:
    """The engine's providers, best first."""
    names = []
    while (name := lib.zinf_provider_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return tuple(names)


def is_direct(provider: str) -> bool:
    """Whether the provider wants files that were opened with O_DIRECT."""
    return bool(lib.zinf_provider_is_direct(_known(provider).encode()))


def checksums_in_hardware() -> bool:
    """Whether the processor has an instruction for crc32c; tables are about 7 times slower."""
    return bool(lib.zinf_crc32c_in_hardware())


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes."""
    return lib.zinf_crc32c(0, ffi.from_buffer(data), len(data))


def crc32c_at(address: int, nbytes: int) -> int:
    """The CRC-32C of so many bytes of memory. Other threads run meanwhile."""
    return lib.zinf_crc32c(0, ffi.cast("void *", address), nbytes)


def direct_alignment(fd: int) -> int | None:
    """Alignment in bytes of direct I/O on an open file: at least 4096; None if the file system says it has none."""
    alignment = lib.zinf_alignment(fd)
    if alignment < 0:
        raise StoreError("statx", f"descriptor {fd}", "can't tell the alignment", errno=-alignment)
    return alignment or None


def _known(provider: str) -> str:
    if provider not in (names := provider_names()):
        raise ConfigError(f"unknown I/O provider {provider!r}; accepted: {', '.join(names)}")
    return provider


@dataclass(frozen=True)
class IoCounters:
    """Bytes moved, and seconds during which at least one block of that direction was under way.

    The operating system was given `transfers`, fewer than requests where small ones were merged. `bytes_checked` were
    summed or compared with their checksums, which took `check_seconds` of the I/O thread.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    transfers: int = 0
    bytes_checked: int = 0
    check_seconds: float = 0.0

    def __add__(self, other: IoCounters) -> IoCounters:
        """Return the counters of two engines together."""
        return IoCounters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def _counters(raw: ffi.CData) -> IoCounters:
    return IoCounters(
        raw.bytes_read,
        raw.bytes_written,
        raw.read_ns / 1e9,
        raw.write_ns / 1e9,
        raw.transfers,
        raw.bytes_checked,
        raw.check_ns / 1e9,
    )


class Engine:
    """One I/O thread with a queue of its own.

    Args:
        provider: one of `provider_names()`.
        depth: blocks under way at a time.
        block: bytes of a block, a multiple of 4096.

    Raises:
        StoreError: the provider can't be set up here; `errno` tells why.
    """

    def __init__(self, provider: str, *, depth: int = DEPTH, block: int = BLOCK) -> None:
        out = ffi.new("zinf_engine **")
        code = lib.zinf_engine_open(_known(provider).encode(), depth, block, out)
        if code:
            detail = SET_UP_HINTS.get(-code, "this I/O provider can't be started")
            raise StoreError("set-up", provider, detail, errno=-code)
        self.provider = provider
        self._engine = out[0]
        self._pid = os.getpid()
        self._closed = False
        self._last = IoCounters()
        self._under_way: deque[FileTicket] = deque()
        self._sweep_at = _SWEPT_AT_LEAST

    def attach(self, fd: int, path: str | os.PathLike[str], *, alignment: int) -> File:
        """A handle for an open descriptor, which stays the caller's. `alignment`: bytes, 1 for none."""
        out = ffi.new("zinf_file **")
        code = lib.zinf_file_attach(self._open(), fd, alignment, out)
        if code:
            raise StoreError("open", path, "no handle for this file", errno=-code)
        return File(self, out[0], path)

    def counters(self) -> IoCounters:
        """What was moved so far. A closed engine keeps its last values."""
        if not self._closed:
            raw = ffi.new("zinf_counters *")
            lib.zinf_engine_counters(self._open(), raw)
            self._last = _counters(raw)
        return self._last

    def keep(self, ticket: FileTicket) -> None:
        """Hold a ticket whose transfer begins, and so its memory, until it is over, whoever drops it meanwhile."""
        self._under_way.append(ticket)
        if len(self._under_way) >= self._sweep_at:
            self.sweep()
            self._sweep_at = 2 * len(self._under_way) + _SWEPT_AT_LEAST

    def sweep(self) -> None:
        """Let go of transfers that are over."""
        for _ in range(len(self._under_way)):
            try:
                ticket = self._under_way.popleft()
            except IndexError:  # another thread sweeps too
                return
            if not ticket.done():
                self._under_way.append(ticket)

    def close(self) -> None:
        """Finishes every request and joins the thread. Tickets stay valid. A forked child leaves it alone."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        raw = ffi.new("zinf_counters *")
        code = lib.zinf_engine_close(self._engine, raw)
        self._last = _counters(raw)
        self._under_way.clear()
        if code:
            raise StoreError("close", self.provider, "the I/O thread can't be joined", errno=-code)

    def _open(self) -> ffi.CData:
        if self._closed:
            raise StoreError("use", self.provider, HINTS[errno.ESHUTDOWN], errno=errno.ESHUTDOWN)
        if os.getpid() != self._pid:
            raise StoreError("use", self.provider, HINTS[errno.ECHILD], errno=errno.ECHILD)
        return self._engine


class PageSums:
    """The checksums of consecutive pages of 4096 bytes, none of which is known yet.

    They are in memory, 4 bytes a page, so that data which is not what was written last can't come with a checksum that
    fits. `generation` tells one life of the same pages from the next.
    """

    __slots__ = ("generation", "pages", "table")

    def __init__(self, pages: int, generation: int) -> None:
        self.pages = pages
        self.generation = generation
        self.table = ffi.new("uint32_t[]", pages)

    def learn(self, first: int, address: int, nbytes: int, offset: int) -> None:
        """Have the checksums of whole pages in memory, which lie at `offset` of the file, without writing them."""
        table = self.table + first
        lib.zinf_page_sums(ffi.cast("void *", address), nbytes, offset, self.generation, table)

    def joined(self, first: int, pages: int, offset: int, crc: int = 0) -> int | None:
        """The CRC-32C of consecutive pages that lie at `offset` of the file, as of one piece of data, behind data with
        the CRC-32C `crc`; None where that of a page is not known."""
        joined = ffi.new("uint32_t *", crc)
        known = lib.zinf_joined_sums(self.table + first, pages, offset, self.generation, joined)
        return None if known else joined[0]


class File:
    """An open file that an engine works on. Made by `Engine.attach`."""

    def __init__(self, engine: Engine, handle: ffi.CData, path: str | os.PathLike[str]) -> None:
        self.engine = engine
        self.path = path
        self._handle = handle

    @held_back
    def submit(
        self,
        operation: int,
        address: int,
        offset: int,
        nbytes: int,
        owner: object = None,
        *,
        sums: PageSums | None = None,
        first_page: int = 0,
    ) -> FileTicket:
        """Starts a transfer between memory at `address` and the file at `offset`, both in bytes.

        `owner` is kept alive until the transfer is over; without one, the caller must keep the memory. With `sums`,
        whose entry `first_page` is that of the page at `offset`, a write sets checksums and a read compares them.
        """
        self.engine._open()
        table, generation = ffi.NULL, 0
        if sums is not None:
            assert first_page + nbytes // lib.ZINF_PAGE <= sums.pages, f"{sums} has no checksums for {nbytes} bytes"
            table, generation, owner = sums.table + first_page, sums.generation, (owner, sums)
        ticket = FileTicket(self, operation, offset, nbytes, owner)
        code = ticket.begin(self._handle, operation, address, table, generation)
        if code:
            detail = HINTS.get(-code, "the request can't be queued")
            raise StoreError(ticket.name, self.path, detail, offset=offset, length=nbytes, errno=-code)
        self.engine.keep(ticket)
        return ticket

    @held_back
    def detach(self) -> None:
        """Waits for the file's requests and drops the handle. A forked child leaves it alone."""
        if self._handle is None or os.getpid() != self.engine._pid:
            return
        code = _in_slices(lambda ns: lib.zinf_file_detach(self._handle, ns), f"everything under way on {self.path}")
        assert code == 0, f"detach of {self.path}: {os.strerror(-code)}"
        self._handle = None
        self.engine.sweep()


class FileTicket:
    """One transfer under way. Waiting for it waits for no other.

    Its memory's owner is kept until the transfer is over, even if the ticket is dropped earlier: the engine has the
    ticket, too. An error that nobody asked for is logged.
    """

    __slots__ = ("__weakref__", "_arrived", "_file", "_observed", "_owner", "_request", "length", "name", "offset")

    def __init__(self, file: File, operation: int, offset: int, length: int, owner: object) -> None:
        self._observed = True  # nothing is under way before `begin`
        self._arrived = False
        self._file = file
        self._owner = owner
        self.name = OPERATIONS[operation]
        self.offset = offset
        self.length = length

    def begin(self, handle: ffi.CData, operation: int, address: int, table: ffi.CData, generation: int) -> int:
        """Queue the transfer. Returns 0, or what `zinf_submit` says."""
        out, place = ffi.new("zinf_request **"), ffi.cast("void *", address)
        code = lib.zinf_submit(handle, operation, place, self.offset, self.length, table, generation, out)
        if not code:
            self._request = ffi.gc(out[0], lib.zinf_release)
            self._observed = False
        return code

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        return f"Ticket({self.name} of {self.length} bytes at {self.offset} of {self._file.path}, {state})"

    def done(self) -> bool:
        """Whether the transfer is over, well or not."""
        return bool(lib.zinf_done(self._request))

    def span(self) -> Span:
        """When the transfer goes on; may outlive the ticket."""
        return Span(self._request)

    def wait(self) -> None:
        """Returns when this transfer's bytes are there. May be called again, with the same outcome.

        Raises:
            StoreError: the transfer failed; with operation, file, offset, length and errno.
        """
        if self._arrived:
            return
        if not self.done():
            what = f"the {self.name} of {self.length} bytes at offset {self.offset} of {self._file.path}"
            code = _in_slices(lambda ns: lib.zinf_wait(self._request, ns), what)
            if code:
                detail = HINTS.get(-code, "waiting failed")
                raise StoreError("wait", self._file.path, detail, offset=self.offset, errno=-code)
        self._owner = None
        self._observed = True
        # A new error each time: one that is kept would keep, by its traceback, whoever waited before.
        error = self._error()
        if error is not None:
            raise error
        self._arrived = True

    def _error(self) -> StoreError | None:
        outcome = _outcome(self._request)
        if not outcome.error:
            return None
        poisoned = "an earlier request saw the device fail; the file accepts no more requests"
        detail = poisoned if outcome.poisoned else HINTS.get(outcome.error, "the transfer failed")
        where = {"offset": outcome.offset, "length": outcome.length, "errno": outcome.error}
        return StoreError(self.name, self._file.path, detail, **where)

    def __del__(self) -> None:
        # Of one whose construction failed nothing is known. An interrupt here is dropped, and with it only a message.
        mine = not getattr(self, "_observed", True) and os.getpid() == self._file.engine._pid
        if mine and self.done() and (error := self._error()) is not None:
            log.error("nobody waited for a ticket that failed: %s", error)


class Span:
    """When one transfer goes on. Keeps neither its memory nor its owner."""

    __slots__ = ("_request",)

    def __init__(self, request: ffi.CData) -> None:
        self._request = request

    def seconds(self) -> tuple[float, float] | None:
        """When the I/O thread began with it and when it was over, well or not, in the clock of `time.perf_counter`;
        None while it is under way."""
        if not lib.zinf_done(self._request):
            return None
        outcome = _outcome(self._request)
        return outcome.began_ns / 1e9, outcome.ended_ns / 1e9


def _outcome(request: ffi.CData) -> ffi.CData:
    outcome = ffi.new("zinf_outcome *")
    lib.zinf_result(request, outcome)
    return outcome


def _in_slices(wait: Callable[[int], int], what: str) -> int:
    """`wait(ns)` again and again until it doesn't time out: a thread that sleeps in C sees no signal."""
    waited = 0.0
    while (code := wait(int(WAIT_SLICE * 1e9))) == -errno.ETIMEDOUT:
        let_through()
        waited += WAIT_SLICE
        if waited % STUCK_AFTER == 0:
            log.warning("waiting for %.0f s for %s", waited, what)
    return code
