"""Ctrl-C, or another signal, strikes at any line of the package. It is the signal itself, so that what holds it back is
tried."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import zinf_fx

_PACKAGE = str(Path(zinf_fx.__file__).parent)


class OutOfTime(Exception):
    """What a program's handler of a time limit raises."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Run a block in which SIGALRM raises `OutOfTime`."""

    def raise_error(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, raise_error)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupted_at(number: int, call: Callable[[], object], sent: signal.Signals = signal.SIGINT) -> tuple[bool, int]:
    """Run `call` with a signal raised at its `number`-th line of the package, counted from 1 (0: never).

    Returns whether KeyboardInterrupt or OutOfTime came out of it, and how many lines it came to before the signal.
    """
    lines = 0

    def on_line(frame: FrameType, event: str, _: Any) -> Callable | None:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == number:
                sys.settrace(None)
                signal.raise_signal(sent)
                return None
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Callable | None:
        return on_line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    before = sys.gettrace()
    try:
        sys.settrace(on_call)
        call()
        if 0 < number <= lines:
            time.sleep(0.2)  # one that a finalizer held back comes a little later
        return False, lines
    except (KeyboardInterrupt, OutOfTime):
        return True, lines
    finally:
        sys.settrace(before)
