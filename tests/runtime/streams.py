"""The streams and events of a CUDA device, without one: what is queued runs as early or as late as its events allow.

Inside `with cuda.stream(s)` nothing is computed: in-place copies are queued on `s`. A stream that is `eager` runs what
it has at once, and of the others what it waits for; these run nothing else before somebody has to wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Event:
    """Comes when its stream has run what was queued before it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.come = False

    def query(self) -> bool:
        return self.come

    def synchronize(self) -> None:
        self._stream.run(until=self)


class Stream:
    """A queue of events to wait for, of work, and of events to report."""

    _numbers = count()

    def __init__(self, cuda: Cuda, eager: bool) -> None:
        self.cuda_stream = next(self._numbers)
        self._cuda, self.eager = cuda, eager
        self._queue: deque[Callable[[], None] | Event | tuple[Event]] = deque()

    def record_event(self) -> Event:
        event = Event(self)
        self.put((event,))
        return event

    def wait_event(self, event: Event) -> None:
        self.put(event)

    def put(self, item: Callable[[], None] | Event | tuple[Event]) -> None:
        self._queue.append(item)
        self._cuda.run_eager()

    def run(self, until: Event | None = None) -> None:
        """Run what is queued, and what it waits for, up to an event or the end."""
        while self._queue and not (until and until.come):
            item = self._queue.popleft()
            if isinstance(item, Event):
                item.synchronize()
            elif isinstance(item, tuple):
                item[0].come = True
            else:
                item()


class Cuda:
    """What `torch.cuda` is for the runtime's device. The first stream is that of compute."""

    def __init__(self, eager_copies: bool) -> None:
        self._streams: list[Stream] = []
        self._eager_copies = eager_copies
        self._current = self.Stream()
        self._current.eager = not eager_copies

    def Stream(self, device: object = None) -> Stream:
        stream = Stream(self, self._eager_copies)
        self._streams.append(stream)
        return stream

    def current_stream(self, device: object = None) -> Stream:
        return self._current

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            with _Queued(stream):
                yield
        finally:
            self._current = before

    def run_eager(self) -> None:
        for stream in self._streams:
            if stream.eager:
                stream.run()

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.run()


class _Queued(TorchDispatchMode):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        self._stream.put(lambda: target.copy_(source))
        return target
