"""Writes under way to one store, and the buffers that they are made from."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from zinf_fx.errors import StoreError
from zinf_fx.runtime.memory.arena import Buffer, ReleaseQueue
from zinf_fx.runtime.memory.transfers import Counters, Ticket
from zinf_fx.runtime.recorder import RECORDER

# Dirty bytes that may be on their way to the store before a writer waits for the oldest.
_MAX_BYTES_WRITING = 256 << 20


class DelayedWrite:
    """A write to the store that begins when the values are in host memory, and somebody asks."""

    def __init__(self, arrival: Ticket, write: Callable[[], Ticket]) -> None:
        self._arrival = arrival
        self._write: Callable[[], Ticket] | None = write
        self._ticket: Ticket | None = None
        self._purpose = RECORDER.purpose()
        self._refusal: str | None = None
        self._lock = threading.RLock()

    def begun(self) -> bool:
        """Whether the write is under way or over; begins it if it can."""
        with self._lock:
            if self._write is not None and self._arrival.done():
                write, self._write = self._write, None
                try:
                    with RECORDER.within(self._purpose):
                        self._ticket = write()
                except StoreError as error:
                    self._refusal = str(error)  # an error that is kept would keep, by its traceback, whoever asked
            return self._write is None

    def done(self) -> bool:
        """Whether it is over."""
        return self.begun() and (self._ticket is None or self._ticket.done())

    def wait(self) -> None:
        """Return when the bytes are in the store. Raises: StoreError."""
        if not self.begun():
            self._arrival.wait()
            self.begun()
        if self._refusal is not None:
            raise StoreError("write", "the store", f"it could not begin: {self._refusal}")
        assert self._ticket is not None
        self._ticket.wait()


class WriteQueue(ReleaseQueue):
    """Buffers that are written to the store.

    They come back in the order in which the writes were asked for, and not before there is need of their room: so how
    much the arena holds doesn't depend on how fast the disk is.

    Attributes:
        most: how many bytes may be under way before a writer waits for the oldest.
    """

    def __init__(self, counters: Counters, lock: threading.RLock | None = None) -> None:
        """`lock` is that of another queue, whose buffers come back for the same who wait."""
        super().__init__()
        self.lock = lock or self.lock
        self._counters, self.most = counters, _MAX_BYTES_WRITING
        # Those among the writes that have not begun, and whose bytes they write: while one begins, the finalizer of
        # these, which waits for it, must not run.
        self._delayed: deque[tuple[DelayedWrite, object]] = deque()

    def add(self, ticket: Ticket, buffer: Buffer, owner: object = None) -> None:
        """Take over `buffer` until `ticket`, a write of `owner` from it, is done; waits for others where many are under
        way."""
        with self.lock:
            super().add(ticket, buffer)
            if isinstance(ticket, DelayedWrite):
                self._delayed.append((ticket, owner))
            self._begin_delayed()
        self.limit(max(self.most, buffer.capacity))

    def limit(self, nbytes: int) -> None:
        """Wait until at most `nbytes` are under way. Raises: StoreError of one that failed."""
        self._counters.write_stall_seconds += self._retire_while(lambda: self.nbytes > nbytes)

    def at_most(self, nbytes: int) -> bool:
        """Whether `limit` would return at once."""
        with self.lock:
            self._begin_delayed()
            left = self.nbytes
            for ticket, buffer in self._queue:
                if left <= nbytes or not ticket.done():
                    break
                left -= buffer.capacity
            return left <= nbytes

    @property
    def idle(self) -> bool:
        """Whether no write is under way."""
        with self.lock:
            return all(ticket.done() for ticket, _ in self._queue)

    def drain(self) -> None:
        """Wait for every write. Raises: StoreError of the first that failed, after all have ended."""
        failure: BaseException | None = None
        while self._queue:
            try:
                self._retire_while(lambda: bool(self._queue))
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def vacate(self, lies_there: Callable[[Buffer], bool]) -> None:
        """Wait for the writes whose buffers lie in a place, and for those before them."""
        self._counters.write_stall_seconds += self._retire_while(lambda: self._until(lies_there) > 0)

    def _retire_while(self, must: Callable[[], bool]) -> float:
        """Retire writes while that must be. Others may use the queue while this waits for the disk. Returns the
        seconds. Raises: StoreError of one that failed, which is retired, too."""
        started = None
        while True:
            with self.lock:
                self._begin_delayed()
                if not must():
                    break
                first, _ = self._queue[0]
                if first.done():
                    self.retire()
                    continue
            started = started or time.perf_counter()
            with suppress(StoreError):  # which `retire` raises
                first.wait()
        return 0.0 if started is None else RECORDER.waited(started, "writes")

    def is_vacant(self, lies_there: Callable[[Buffer], bool]) -> bool:
        """Whether `vacate` would return at once."""
        with self.lock:
            self._begin_delayed()
            return all(ticket.done() for ticket, _ in islice(self._queue, self._until(lies_there)))

    def _until(self, lies_there: Callable[[Buffer], bool]) -> int:
        """Return how many writes there are up to the last one whose buffer lies in a place."""
        numbers = [number for number, (_, buffer) in enumerate(self._queue, start=1) if lies_there(buffer)]
        return numbers[-1] if numbers else 0

    def retire(self) -> None:
        self._begin_delayed()
        try:
            super().retire()
        finally:
            self._begin_delayed()

    def _begin_delayed(self) -> None:
        while self._delayed and self._delayed[0][0].begun():
            self._delayed.popleft()
