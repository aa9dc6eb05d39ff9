"""Waits that last no longer than they are asked to, and that Ctrl-C ends at once.

Python runs no handler of a signal while C++ waits, and a backend may ignore the time that its `Work.wait` is given. So
a thread waits in C++, for a little at a time, and who needs the result waits for that thread. A thread that is in C++
when the interpreter ends may end the process badly: those that were given up are waited for then.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from zinf_fx.interrupts import let_through

_SLICE = 0.05  # seconds from one look for interrupts to the next
_FIRST_PAUSE = 0.0002
_SHARE = 0.05  # of the time that has passed, which the next pause may add
_AT_EXIT = 1.0  # seconds for which waits that were given up are waited for


class Waiting:
    """A block in which a call is repeated, in a thread of its own, until it says that what it waits for is over."""

    def __init__(self, call: Callable[[], bool]) -> None:
        """`call`: waits for a short time; whether it is over."""
        self._call: Callable[[], bool] | None = call
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._given_up = False

    @classmethod
    def for_work(cls, work: dist.Work) -> Waiting:
        return cls(lambda: _is_over(work))

    def __enter__(self) -> Waiting:
        _busy.add(self)
        try:
            thread = _idle.pop()
        except IndexError:  # not asked before: another thread may take the last one in between
            thread = _Thread()
        thread.waits.put(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._given_up = True

    def run(self) -> None:
        """Repeat the call, in this thread."""
        try:
            while not (self._given_up or self._call is None or self._call()):
                pass
        except BaseException as error:
            self.error = error
        self._call = None  # what it holds may go
        _busy.discard(self)

    def over(self, seconds: float) -> bool:
        """Whether the call returns within so many seconds. Raises: what the call raises; an interrupt."""
        end = time.monotonic() + seconds
        while not self.ended.wait(min(_SLICE, max(0.0, end - time.monotonic()))):
            let_through()
            if time.monotonic() >= end:
                return False
        if self.error is not None:
            raise self.error
        return True


class _Thread:
    """Runs one wait after the other, and is in the list of idle ones in between."""

    def __init__(self) -> None:
        self.waits: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="zinf_fx waiting", daemon=True).start()

    def _run(self) -> None:
        # What the wait writes to may be an inference tensor, which may be written to in this mode alone.
        with torch.inference_mode():
            while True:
                waiting = self.waits.get()
                waiting.run()
                _idle.append(self)
                waiting.ended.set()
                del waiting


_idle: list[_Thread] = []
_busy: set[Waiting] = set()


def _forget() -> None:
    """In a process made by fork: the threads are in the parent."""
    _idle.clear()
    _busy.clear()


@atexit.register
def _end() -> None:
    end = time.monotonic() + _AT_EXIT
    while _busy and time.monotonic() < end:
        time.sleep(_FIRST_PAUSE)


os.register_at_fork(after_in_child=_forget)


def _is_over(work: dist.Work) -> bool:
    """Whether a collective is over within a short time. Raises: what torch.distributed raises."""
    asked = time.monotonic()
    try:
        work.wait(timedelta(seconds=_SLICE))
    except RuntimeError:
        if time.monotonic() - asked < 0.9 * _SLICE:
            raise  # it is over, and failed
        return False
    return True


def polling(seconds: float) -> Iterator[None]:
    """Yield at once and then now and then, less often as time passes, for so many seconds. Raises: an interrupt."""
    begun = time.monotonic()
    while True:
        yield
        let_through()
        passed = time.monotonic() - begun
        if passed >= seconds:
            return
        pause = min(max(_FIRST_PAUSE, _SHARE * passed), _SLICE)
        time.sleep(min(pause, seconds - passed))
