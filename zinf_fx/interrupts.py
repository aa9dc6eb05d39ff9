"""Ctrl-C, and what other handlers of signals raise, reach the runtime only where its books are in order.

[Note: interrupts]
Python runs the handlers of signals between any two bytecodes of the main thread, and what they raise comes out there:
KeyboardInterrupt of SIGINT, a time limit's error of SIGALRM. Memory that changes hands between Python,
the disk and a device would be lost there, or given back while the disk writes into it, whatever the order of the
statements. So each way into the runtime (offloading, a graph, a hook of autograd, an operation on stored tensors, an
optimizer's step, saving and loading, a finalizer) is a block that holds interrupts back: `held_back`. What is called
from there alone has no block of its own. Interrupts arrive when the outermost block ends, or earlier at a call of
`let_through`: between the parameters that are offloaded, the operators of a graph, the chunks of a step, and in a wait
that lasts, for the disk or for a lock (`taking`). What calls it is ready for an error of the disk there, and so for an
interrupt.

What gives memory back after an error has to be done to its end: in a `sealed` block, nothing is let through either.
What a finalizer does, too; and as Python drops what a finalizer raises, an interrupt comes after a `finalizing` block,
at some other moment.

Held back are signals (see `_SIGNALS`) for which a handler of Python's is in force when the outermost block begins, in
the main thread, where these run. Nobody is locked in: when one Ctrl-C has been held back for PATIENCE, the next goes
through at once, wherever that is. What the runtime knows may be wrong then. Another signal waits for as long as it
takes: a timer's comes again and again. What is raised in a thread by CPython's PyThreadState_SetAsyncExc can't be held
back by anybody.
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
    from _signal import getsignal as _get  # pyright: ignore[reportMissingImports]
    from _signal import signal as _set  # pyright: ignore[reportMissingImports]
except ImportError:
    from signal import getsignal as _get
    from signal import signal as _set

PATIENCE = 1.0
"""Seconds for which a Ctrl-C has been held back when the next one goes through."""

_SLICE = 0.05
"""Seconds for which one waits for a lock before an interrupt is let through."""

_SIGINT = int(signal.SIGINT)

# Those that come from outside and may have a handler of Python's. The others stand for an error of the program itself.
_ERRORS = {signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGSYS}
_SIGNALS = tuple(sorted(set(range(1, 32)) - {int(number) for number in (*_ERRORS, signal.SIGKILL, signal.SIGSTOP)}))

Handler = Callable[[int, FrameType | None], object]

P = ParamSpec("P")
R = TypeVar("R")


class _Held:
    """The signals that the main thread holds back.

    Attributes:
        depth: blocks that are open; `sealed` of them let nothing through.
        since: when the first signal that is held back came; None if none did.
        main: the main thread.
    """

    def __init__(self) -> None:
        self.depth = self.sealed = 0
        self._handlers: dict[int, Handler] = {}  # of each signal, outside of the blocks; empty if no block is open
        self._came: dict[int, float] = {}  # those that are held back, and when the first of each came
        self.since: float | None = None
        self.main = threading.main_thread().ident or 0  # which only a thread that has not begun lacks
        self._forks = False
        self._take: Handler = self.take  # the same object each time

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal while a block is open."""
        now = time.monotonic()
        came = self._came.setdefault(number, now)
        self.since = min(self._came.values())
        if number == _SIGINT and now - came > PATIENCE and (frame is None or frame.f_globals is not globals()):
            self._hand_on(number, frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        """Give what is held back to its handlers, each of which may raise; the others wait on, then."""
        for number in list(self._came):
            self._hand_on(number, frame)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if self._came.pop(number, None) is not None and number in self._handlers:
            self.since = min(self._came.values(), default=None)
            self._handlers[number](number, frame)

    def begin(self) -> None:
        """Open the outermost block. A finalizer that the garbage collector runs meanwhile is in it: were its block an
        outermost one, too, it would take handlers for the user's that are not."""
        try:
            self.depth = 1
            self.since = None
            self._came.clear()
            for number in _SIGNALS:
                handler = _get(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _set(number, self._take)
        except BaseException:  # a handler that isn't held back yet
            self.end()
            raise

    def end(self, later: bool = False) -> None:
        """End the outermost block, and raise what was held back: at once, or `later`."""
        try:
            try:
                self._put_back()
            finally:
                self.depth = 0
        finally:
            self.depth = 0  # also where a handler that is back in force raised at the line above
            came = list(self._came)
            self.since = None
            self._came.clear()
            if came and later:
                _thread.start_new_thread(_interrupt_soon, (came,))
            elif came:
                _raise_all(came)

    def _put_back(self) -> None:
        """Let all handlers be in force again, also where the first of them raise at once."""
        try:
            while self._handlers:
                number = next(iter(self._handlers))
                if _get(number) is self._take:  # nobody in the block has set another
                    _set(number, self._handlers[number])
                del self._handlers[number]
        finally:
            if self._handlers:
                self._put_back()

    def remember(self) -> None:
        """A fork begins in this thread."""
        self._forks = get_ident() == self.main

    def after_fork(self) -> None:
        """In a child that another thread than the main one made, nobody is left in the blocks that are open. Its main
        thread is this one."""
        self.main = get_ident()
        if not self._forks and self.depth:
            self.sealed = 0
            self._came.clear()
            self.end()


INTERRUPTS = _Held()
"""Those that are held back. While `since` is None, there are none, and `let_through` does nothing."""

os.register_at_fork(before=INTERRUPTS.remember, after_in_child=INTERRUPTS.after_fork)


def _interrupt_soon(numbers: list[int]) -> None:
    time.sleep(_SLICE)
    for number in numbers:
        signal.pthread_kill(INTERRUPTS.main, number)


def _raise_all(numbers: list[int]) -> None:
    """Raise signals in this order, also where handlers raise: the last error has the others as its context."""
    number, *remaining = numbers
    try:
        signal.raise_signal(number)
    finally:
        if remaining:
            _raise_all(remaining)


class Block:
    """A context manager and decorator: see [Note: interrupts]. Blocks nest."""

    def __init__(self, sealed: bool, finalizing: bool = False) -> None:
        self._sealed, self._finalizing = sealed, finalizing

    def __enter__(self) -> None:
        if get_ident() == INTERRUPTS.main:
            if INTERRUPTS.depth:
                INTERRUPTS.depth += 1
            else:
                INTERRUPTS.begin()
            INTERRUPTS.sealed += self._sealed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if get_ident() == INTERRUPTS.main:
            INTERRUPTS.sealed -= self._sealed
            if INTERRUPTS.depth > 1:
                INTERRUPTS.depth -= 1
            else:
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
"""In the block, signals wait for `let_through`, or for its end."""

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
