"""[Note: workers] The CPU updates the pieces of a chunk at the same time, each in one thread from its first operation
to its last.

PyTorch divides every operation among its threads, which wait for each other behind each. An update is a dozen of
operations of some ten microseconds, so that much of its time would go into that, and more where a processor has
something else to do, as the engine's thread has. Where there is one piece, or one thread, it is as everywhere.

How many threads an operation takes is PyTorch's to know, for each thread that calls one: those here take one. They are
there from the first chunk of several pieces on, and are as many as PyTorch's own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

import torch

from zinf_fx.plan.memory.accounting import AT_A_TIME, AT_ONCE
from zinf_fx.runtime.memory.freelist import round_up
from zinf_fx.sizes import WINDOW_ALIGNMENT

P = TypeVar("P")
R = TypeVar("R")

# Elements of a piece that is worth a thread: what Python does for a piece holds up the others.
LEAST = AT_A_TIME // 4


def lanes_for(elements: int) -> tuple[int, int]:
    """How many pieces of a chunk of at most so many elements are updated at the same time, and of how many elements a
    piece is at most."""
    threads = torch.get_num_threads()
    piece = min(AT_A_TIME, max(LEAST, round_up(-(-elements // threads), WINDOW_ALIGNMENT)))
    lanes = min(threads, elements // piece, AT_ONCE // piece)
    return (lanes, piece) if lanes > 1 else (1, min(AT_A_TIME, elements))


def at_the_same_time(work: Callable[[P], R], several: Sequence[P], lanes: int) -> Iterator[R]:
    """`work` of each, by the threads; what it gives comes in order. When this is closed, all that began is over. In one
    lane, or without threads, as at exit, the work is done here."""
    futures: list[Future[R]] = []
    pool = _pool_of(torch.get_num_threads()) if lanes > 1 else None
    if pool is not None:
        with suppress(RuntimeError):  # Python takes no more work when it is about to exit
            for one in several:
                futures.append(pool.submit(_served, threading.get_ident(), work, one))
    try:
        for future in futures:
            yield future.result()
        for one in several[len(futures) :]:
            yield work(one)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def serves(thread: int | None) -> bool:
    """Whether this is a thread that works for another one, which waits for it."""
    return getattr(_here, "thread", None) == thread


_here = threading.local()
_starting = threading.RLock()
_pool: ThreadPoolExecutor | None = None
_count = 0


def _served(thread: int, work: Callable[[P], R], one: P) -> R:
    _here.thread = thread
    try:
        with torch.no_grad():
            return work(one)
    finally:
        _here.thread = None


def _pool_of(threads: int) -> ThreadPoolExecutor | None:
    """The pool, of so many threads; None where the system has no more of them."""
    global _pool, _count
    with _starting:
        if _count != threads:
            if _pool is not None:
                _pool.shutdown()
            _pool, _count = _started(threads), threads
        return _pool


def _started(threads: int) -> ThreadPoolExecutor | None:
    began = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # PyTorch sets the number of a thread when it first asks
        torch.set_num_threads(1)
        began.wait()

    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "zinf-update")
    try:
        for _ in range(threads):
            pool.submit(begin)  # in a thread of its own, as all others wait
        began.wait()
    except RuntimeError:  # there are as many threads as there may be
        began.abort()
        pool.shutdown()
        return None
    finally:
        torch.set_num_threads(before)  # of this thread, and of those that have not asked yet
    return pool


def _after_fork() -> None:
    """A child has none of the threads."""
    global _pool, _count, _starting
    _pool, _count, _starting = None, 0, threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
