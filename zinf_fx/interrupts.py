"""Ctrl-C reaches the runtime only where its books are in order.

[Note: interrupts]
Python raises KeyboardInterrupt between any two bytecodes of the main thread. Memory that changes hands between Python,
the disk and a device would be lost there, or given back while the disk writes into it, whatever the order of the
statements. So each way into the runtime (a graph, a hook of autograd, an operation on stored tensors, an optimizer's
step, a finalizer) is a block that holds interrupts back: `held_back`. They arrive when the outermost block ends, or
earlier at a call of `let_through`: between the operators of a graph, between the chunks of a step, and in a wait that
lasts, for the disk or for a lock (`taking`). What calls it is ready for an error of the disk there, and so for an
interrupt.

What gives memory back after an error has to be done to its end: in a `sealed` block, nothing is let through either.
What a finalizer does, too; and as Python drops what a finalizer raises, an interrupt comes after a `finalizing` block,
at some other moment.

Only SIGINT is held back, in the main thread, where Python's handlers run, and only where a handler of Python's is in
force. Nobody is locked in: when one interrupt has been held back for PATIENCE, the next goes through at once, wherever
that is. What the runtime knows may be wrong then.
"""

from __future__ import annotations

import _thread
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from threading import get_ident
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

try:  # CPython's own, without the functions around them that look for enumerations: ten times as fast
    from _signal import getsignal as _get
    from _signal import signal as _set
except ImportError:
    from signal import getsignal as _get
    from signal import signal as _set

PATIENCE = 1.0
"""Seconds for which an interrupt has been held back when the next one goes through."""

_SLICE = 0.05
"""Seconds for which one waits for a lock before an interrupt is let through."""

_SIGINT = int(signal.SIGINT)

P = ParamSpec("P")
R = TypeVar("R")


class _Held:
    """The interrupts that the main thread holds back.

    Attributes:
        depth: blocks that are open; `sealed` of them let nothing through.
        handler: what handles SIGINT outside of the blocks; None if it raises nothing, or no block is open.
        since: when the first interrupt that is held back came; None if none did.
    """

    def __init__(self) -> None:
        self.depth = self.sealed = 0
        self.handler: Callable[[int, FrameType | None], object] | None = None
        self.since: float | None = None
        self.main = threading.main_thread().ident
        self._forks = False
        self._take: Callable[[int, FrameType | None], None] = self.take  # the same object each time

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT while a block is open."""
        now = time.monotonic()
        if self.since is None:
            self.since = now
        elif now - self.since > PATIENCE and (frame is None or frame.f_globals is not globals()):
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        """Give what is held back to its handler, which may raise."""
        if self.since is not None and self.handler is not None:
            self.since = None
            self.handler(_SIGINT, frame)

    def begin(self) -> None:
        """Hold back from now on."""
        self.since = self.handler = None
        handler = _get(_SIGINT)
        if callable(handler):
            self.handler = handler
            _set(_SIGINT, self._take)

    def end(self, later: bool = False) -> None:
        """Hold back no more, and raise what was held back: at once, or `later`."""
        handler, self.handler = self.handler, None
        if handler is None:
            return
        before = _set(_SIGINT, handler)
        if before is not self._take:  # somebody in the block has set another
            _set(_SIGINT, before)
        if self.since is not None:
            self.since = None
            if later:
                _thread.start_new_thread(_interrupt_soon, ())
            else:
                signal.raise_signal(_SIGINT)

    def remember(self) -> None:
        """A fork begins in this thread."""
        self._forks = get_ident() == self.main

    def after_fork(self) -> None:
        """In a child that another thread than the main one made, nobody is left in the blocks that are open. Its main
        thread is this one."""
        self.main = get_ident()
        if not self._forks and self.depth:
            self.depth = self.sealed = 0
            self.since = None
            self.end()


INTERRUPTS = _Held()
"""Those that are held back. While `since` is None, there are none, and `let_through` does nothing."""

os.register_at_fork(before=INTERRUPTS.remember, after_in_child=INTERRUPTS.after_fork)


def _interrupt_soon() -> None:
    time.sleep(_SLICE)
    signal.pthread_kill(INTERRUPTS.main, _SIGINT)


class Block:
    """A context manager and decorator: see [Note: interrupts]. Blocks nest."""

    def __init__(self, sealed: bool, finalizing: bool = False) -> None:
        self._sealed, self._finalizing = sealed, finalizing

    def __enter__(self) -> None:
        if get_ident() == INTERRUPTS.main:
            if not INTERRUPTS.depth:
                INTERRUPTS.begin()
            INTERRUPTS.depth += 1
            INTERRUPTS.sealed += self._sealed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if get_ident() == INTERRUPTS.main:
            INTERRUPTS.sealed -= self._sealed
            INTERRUPTS.depth -= 1
            if not INTERRUPTS.depth:
                INTERRUPTS.end(later=self._finalizing)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            # In a block of the main thread that does the same, another one does nothing; nor does any elsewhere.
            if INTERRUPTS.depth and (INTERRUPTS.sealed or not self._sealed):
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return within


held_back = Block(sealed=False)
"""In the block, interrupts wait for `let_through`, or for its end."""

sealed = Block(sealed=True)
"""In the block, interrupts wait for its end, and for that of the blocks around it or their next `let_through`."""

finalizing = Block(sealed=True, finalizing=True)
"""In the block, interrupts wait for its end, as in a sealed one, and come soon after the finalizer that it is in."""


def let_through() -> None:
    """Raise an interrupt that is held back, except in a sealed block. All is in order here."""
    if INTERRUPTS.since is not None and not INTERRUPTS.sealed and get_ident() == INTERRUPTS.main:
        INTERRUPTS.deliver()


class taking:
    """A block that has the lock, and holds interrupts back: it can't stay locked. While another thread has it, they get
    through."""

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        held_back.__enter__()
        try:
            while not self._lock.acquire(timeout=_SLICE):
                let_through()
        except BaseException:
            held_back.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
        held_back.__exit__(kind, error, traceback)
