"""Model the time of a program's threads, of a device's streams, and of a disk at described rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import SimpleNamespace

from zinf_fx.native.engine import READ


class Clock:
    """Count the seconds of the thread that launches, and those of a second thread apart from them.

    Attributes:
        waited: seconds for which the launching thread waited, by what it waited for.
        waits: each of its waits, as (what for, begin, end).
    """

    def __init__(self, counter: Callable[[], float] = time.thread_time) -> None:
        """`counter` counts the seconds of a thread: those of its processor, or `time.perf_counter`, which also counts
        those for which another thread keeps it from going on."""
        self._counter = counter
        self.launching = get_ident()
        self._ahead = {self.launching: -counter()}  # how far each thread's clock is ahead of its counter
        self.waited: dict[str, float] = {}
        self.waits: list[tuple[str, float, float]] = []

    def now(self) -> float:
        return self._counter() + self._ahead[get_ident()]

    def of_launching(self) -> float:
        """Return the time of the thread that launches, for the second thread."""
        processor = time.clock_gettime(time.pthread_getcpuclockid(self.launching))
        return processor + self._ahead[self.launching]

    def begin(self, now: float) -> None:
        """Start a clock for this thread, at the time `now`."""
        self._ahead[get_ident()] = now - self._counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Open a block that takes no time."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._ahead[get_ident()] -= time.thread_time() - began

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        self._ahead[get_ident()] += seconds

    def wait(self, until: float, what: str) -> None:
        """Let time pass until a moment."""
        now, thread = self.now(), get_ident()
        if until > now:
            self._ahead[thread] += until - now
            if thread == self.launching:
                self.waited[what] = self.waited.get(what, 0.0) + until - now
                self.waits.append((what, now, until))


class Event:
    """An event comes at a moment that is known when it is recorded: nothing depends on what is queued later."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self.seconds = clock, seconds

    def query(self) -> bool:
        return self.seconds <= self._clock.now()

    def synchronize(self) -> None:
        self._clock.wait(self.seconds, "the device")


class Stream:
    """A stream does its work in order.

    Attributes:
        end: when the last work that is queued ends.
        after: the last moment that the stream waits for.
    """

    def __init__(self, clock: Clock, number: int) -> None:
        self._clock, self.cuda_stream = clock, number
        self.end = self.after = 0.0

    def record_event(self) -> Event:
        return Event(self._clock, max(self.end, self.after))

    def wait_event(self, event: Event) -> None:
        self.after = max(self.after, event.seconds)

    def put(self, seconds: float, now: float) -> tuple[float, float, float]:
        """Queue so many seconds of work. Returns from when on the stream is free, from when on the work could begin,
        and when it begins."""
        free, ready = self.end, max(self.end, self.after)
        start = max(ready, now)
        self.end = start + seconds
        return free, ready, start


class Streams:
    """Offer the runtime's device what it uses of `torch.cuda`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._made: list[Stream] = []
        self.compute = self.current = self.Stream()

    def Stream(self, device: object = None) -> Stream:
        self._made.append(Stream(self._clock, len(self._made)))
        return self._made[-1]

    def current_stream(self, index: object = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)


@dataclass
class Disk:
    """Serve requests one after the other, at `read` and `write` bytes per second."""

    clock: Clock
    read: float
    write: float
    _free: float = 0.0

    def submit(self, operation: int, address: int, offset: int, nbytes: int, *_: object, **__: object) -> DiskTicket:
        """Queue a request, as `File.submit` does."""
        with self.clock.stopped():
            now = self.clock.now()
            rate = self.read if operation == READ else self.write
            start = max(self._free, now)
            self._free = start + nbytes / rate
            return DiskTicket(self.clock, start, self._free, "reads" if operation == READ else "writes")

    def detach(self) -> None:
        """Do nothing: there is no file to keep."""


class DiskTicket:
    """The ticket of a request that is done at a known moment."""

    def __init__(self, clock: Clock, start: float, end: float, what: str) -> None:
        self._clock, self._start, self._end, self._what = clock, start, end, what

    def done(self) -> bool:
        return self._end <= self._clock.now()

    def wait(self) -> None:
        self._clock.wait(self._end, self._what)

    def span(self) -> DiskTicket:
        return self

    def seconds(self) -> tuple[float, float] | None:
        """Return when the request began and ended; None before it is done."""
        return (self._start, self._end) if self.done() else None
