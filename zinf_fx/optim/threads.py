"""The threads of a step: those that update pieces of a chunk at the same time, and the one beside training.

[Note: update threads] Parameters on the CPU are updated by so many threads at the same time: native ones that share the
call of a kernel, or those of Python that update a piece each.

PyTorch's number of threads is each thread's own. One that has none yet takes the last that any thread has set, and what
pins a DataLoader's memory sets 1. So the number counts that the thread has which calls the optimizer, not that of the
thread that updates.

[Note: workers] The CPU updates the pieces of a chunk at the same time, each in one thread from its first operation
to its last.

PyTorch divides every operation among its threads, which wait for each other behind each. An update is a dozen of
operations of some ten microseconds, so that much of its time would go into that, and more where a processor has
something else to do, as the engine's thread has. Where there is one piece, or one thread, it is as everywhere.

How many threads an operation takes is PyTorch's to know, for each thread that calls one: those here take one. They are
there from the first chunk of several pieces on, as many as were ever wanted. They flush subnormal numbers to zero where
the thread does that gives them work (`torch.set_flush_denormal` is of one thread), so the result is that of one thread.

[Note: beside] Where a device computes apart from the CPU, the CPU's update of parameters has a thread of its own.

What launches kernels adds parameters to the step, and goes on: the thread waits for their gradients and states, updates
them and writes them back. Whoever needs a parameter waits for its chunk alone, and where the thread has nothing to do
(in backward, until a chunk is full), does the work itself. Where the CPU computes, there is no such thread: two would
share its cores, so that work goes on between operators; so it does where no thread can be started.

What goes wrong in the thread is raised by the next call of the step that comes from another one, which ends the step.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import torch

from zinf_fx.interrupts import let_through
from zinf_fx.plan.chunks import AT_A_TIME, AT_ONCE
from zinf_fx.processors import processors
from zinf_fx.runtime.memory.device import Device
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up

L = TypeVar("L")

P = TypeVar("P")

R = TypeVar("R")

# Elements of a piece that is worth a thread: what Python does for a piece holds up the others.
LEAST = AT_A_TIME // 4


def update_threads(wanted: int | None, of_pytorch: int, *, beside_gpu: bool) -> int:
    """Return how many threads update parameters on the CPU: see [Note: update threads].

    Args:
        wanted: the option `update_threads`.
        of_pytorch: how many threads PyTorch has in the thread that calls the optimizer.
        beside_gpu: whether the program launches kernels meanwhile, for a device with memory of its own.
    """
    if wanted is not None:
        return wanted
    cores = processors().busy_threads
    return min(of_pytorch, cores - 1 if beside_gpu and cores > 2 else cores)


def lanes_for(elements: int, threads: int) -> tuple[int, int]:
    """Return how many pieces of a chunk of at most so many elements so many threads update at the same time, and of how
    many elements a piece is at most."""
    piece = min(AT_A_TIME, max(LEAST, round_up(-(-elements // threads), WINDOW_ALIGNMENT)))
    lanes = min(threads, elements // piece, AT_ONCE // piece)
    return (lanes, piece) if lanes > 1 else (1, min(AT_A_TIME, elements))


def at_the_same_time(work: Callable[[L, P], R], lanes: Sequence[L], pieces: Sequence[P]) -> Generator[R, None, None]:
    """Yield `work` of each of `pieces`, in order, which the threads do in the lanes. A lane does one piece of work at a
    time, so that at most as many are under way. When this is closed, all that began is over.

    In one lane, or where no thread is to be had, as at exit, the work is done here.
    """
    futures: list[Future[R]] = []
    free: SimpleQueue[L] = SimpleQueue()
    for lane in lanes:
        free.put(lane)
    pool = _pool_of(len(lanes)) if len(lanes) > 1 else None
    flushes = sys.float_info.min / 2 == 0  # a subnormal number: PyTorch doesn't tell what was set
    try:
        if pool is not None:
            _here.is_alone = True  # submitting takes locks that a finalizer must not wait for
            try:
                with suppress(RuntimeError):  # Python takes no more work when it is about to exit
                    for piece in pieces:
                        futures.append(pool.submit(_served, threading.get_ident(), flushes, work, free, piece))
            finally:
                _here.is_alone = False
        for future in futures:
            yield future.result()
        for piece in pieces[len(futures) :]:
            yield work(lanes[0], piece)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def serves(thread: int) -> bool:
    """Whether this is a thread of the pool, and worked last for another one, which may wait for it."""
    return _here.serves == thread


class _Here(threading.local):
    """What each thread knows: whether it `is_alone`, so that a step in it does all the work itself; in one of the pool,
    which works there all its life, the thread that it `serves` or served last."""

    is_alone = False
    serves: int | None = None


_here = _Here()

_starting = threading.Lock()

_pool: ThreadPoolExecutor | None = None

_count = 0


def _served(thread: int, flushes: bool, work: Callable[[L, P], R], free: SimpleQueue[L], piece: P) -> R:
    _here.serves = thread
    torch.set_flush_denormal(flushes)
    lane = free.get()
    try:
        with torch.no_grad():
            return work(lane, piece)
    finally:
        free.put(lane)


def _pool_of(threads: int) -> ThreadPoolExecutor | None:
    """Return the pool, of at least so many threads. None where there are no more of them, and for a finalizer that
    steps, in one of them, or where the pool is started or given work."""
    global _pool, _count
    if _here.is_alone or not _starting.acquire(blocking=False):
        return None
    try:
        if _count < threads:
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool, _count = None, 0
            with ThreadPoolExecutor(1) as starter:
                _pool, _count = starter.submit(_started, threads).result(), threads
        return _pool
    except RuntimeError:  # there are as many threads as there may be
        return None
    finally:
        _starting.release()


def _started(threads: int) -> ThreadPoolExecutor:
    """Start a pool, and return it when its threads are there. This is to run in a thread that has asked nothing of
    PyTorch: it sets the number that threads get which have not asked yet, and that of its own.

    Raises: RuntimeError where the system has no more threads.
    """
    all_are_there = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # PyTorch sets the number of a thread when it first asks
        torch.set_num_threads(1)
        _here.is_alone = True
        all_are_there.wait()

    num_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "zinf-update")
    try:
        for _ in range(threads):
            pool.submit(begin)  # in a thread of its own, as all others wait
        all_are_there.wait()
    except BaseException:
        all_are_there.abort()
        pool.shutdown()
        raise
    finally:
        torch.set_num_threads(num_threads)
    return pool


def _after_fork() -> None:
    """A child has none of the threads."""
    global _pool, _count, _starting
    _pool, _count, _starting = None, 0, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

# Seconds for which one waits for the thread before an interrupt is let through.
_SLICE = 0.05


class BackgroundThread:
    """The thread. It is there while there is anything to do, and ends with the main thread.

    Attributes:
        failure: what ended it.
    """

    def __init__(self, device: Device, go_on: Callable[[], bool]) -> None:
        """`go_on` does a part of the work, and returns whether there is more to do at once."""
        self.failure: BaseException | None = None
        self._device, self._go_on = device, go_on
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None  # while it is at work
        self._asked = False

    @property
    def is_this_thread(self) -> bool:
        """Whether it is the thread itself that asks."""
        return self._thread is threading.current_thread()

    def wake(self) -> bool:
        """Wake the thread, because there may be something to do. Returns whether it is there to do it: not when it has
        failed, nor where none can be started."""
        with self._changed:
            self._asked = True
            if self._thread is None and self.failure is None:
                self._thread = self._device.thread(self._work)
                try:
                    self._thread.start()
                except RuntimeError as error:  # there are as many as there may be
                    self._thread = None
                    warnings.warn(
                        f"the optimizer's step has no thread beside training, which does its work itself: {error}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                except BaseException:
                    self._thread = None
                    raise
            return self._thread is not None

    def wait(self, is_so: Callable[[], bool]) -> bool:
        """Wait until something is so that the work brings about. Returns whether it is; if not, nobody else is at
        work."""
        with self._changed:
            while not is_so():
                if self._thread is None or self.is_this_thread:  # which a finalizer may run in
                    return False
                self._changed.wait(_SLICE)
                let_through()
        return True

    def _work(self) -> None:
        more = True
        while more:
            self._asked = False
            try:
                more = self._go_on()
            except BaseException as error:
                self.failure = error
            with self._changed:
                more = (more or self._asked) and self.failure is None and threading.main_thread().is_alive()
                if not more:
                    self._thread = None
                self._changed.notify_all()
