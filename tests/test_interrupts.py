"""What holds Ctrl-C back, and where it gets through."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from interrupting import OutOfTime, interrupted_at, time_limit

from zinf_fx import interrupts
from zinf_fx.interrupts import finalizing, held_back, let_through, sealed, taking


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_comes_at_the_end_of_the_outermost_block():
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with held_back:
            with held_back:
                ctrl_c()
                done.append("inner")
            done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_is_let_through_but_not_in_a_sealed_block():
    done = []
    with held_back:
        ctrl_c()
        with sealed:
            let_through()
            done.append("sealed")
        with pytest.raises(KeyboardInterrupt):
            let_through()
        let_through()  # once
        done.append("after")
    assert done == ["sealed", "after"]


def test_a_function_is_a_block():
    @held_back
    def work(number: int) -> int:
        ctrl_c()
        results.append(number)
        return number

    results: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        work(3)
    assert results == [3]


def test_an_error_in_the_block_is_the_context():
    with pytest.raises(KeyboardInterrupt) as raised, held_back:
        ctrl_c()
        raise ValueError("of the block")
    assert isinstance(raised.value.__context__, ValueError)


def test_it_comes_after_a_finalizer():
    """Python drops what one raises."""
    done = []

    class Ends:
        @finalizing
        def __del__(self) -> None:
            ctrl_c()
            done.append("whole")

    def drop() -> None:
        Ends()
        done.append("goes on")

    with pytest.raises(KeyboardInterrupt):
        drop()
        time.sleep(5)
    assert done == ["whole", "goes on"]


def test_whose_patience_ends_gets_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interrupts, "PATIENCE", 0.01)
    with sealed:
        ctrl_c()
        time.sleep(0.02)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()


@pytest.fixture
def limited():
    """SIGALRM raises an error, as a time limit's."""
    with time_limit():
        yield signal.getsignal(signal.SIGALRM)


def alarm() -> None:
    signal.raise_signal(signal.SIGALRM)


def test_another_signal_waits_for_the_end_of_the_block(limited: object):
    done = []
    with pytest.raises(OutOfTime), sealed:
        alarm()
        let_through()
        done.append("whole")
    assert done == ["whole"] and signal.getsignal(signal.SIGALRM) is limited


def test_another_signal_is_let_through(limited: object):
    with held_back:
        alarm()
        with pytest.raises(OutOfTime):
            let_through()
        let_through()  # once


def test_two_signals_both_arrive(limited: object):
    with pytest.raises(KeyboardInterrupt) as raised, held_back:
        alarm()
        ctrl_c()
    assert isinstance(raised.value.__context__, OutOfTime)
    with held_back:
        ctrl_c()
        alarm()
        with pytest.raises(KeyboardInterrupt):
            let_through()
        with pytest.raises(OutOfTime):
            let_through()
    assert signal.getsignal(signal.SIGALRM) is limited
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_only_ctrl_c_gets_out_where_it_waited_for_long(limited: object, monkeypatch: pytest.MonkeyPatch):
    """A timer comes again and again, and would tear what takes its time."""
    monkeypatch.setattr(interrupts, "PATIENCE", 0.01)
    done = []
    with pytest.raises(OutOfTime), sealed:
        for _ in range(3):
            alarm()
            time.sleep(0.02)
        done.append("whole")
    assert done == ["whole"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1, signal.SIGPROF, signal.SIGHUP], ids=str)
def test_whichever_signal_has_a_handler(sent: signal.Signals):
    seen: list[object] = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731
    before = signal.signal(sent, handler)
    try:
        with held_back:
            signal.raise_signal(sent)
            assert not seen
        assert seen == [sent] and signal.getsignal(sent) is handler
    finally:
        signal.signal(sent, before)


@pytest.mark.parametrize("block", [held_back, sealed, finalizing])
def test_handlers_are_in_force_again_whenever_a_signal_comes(limited: object, block: interrupts.Block):
    """It comes at each line of a block's own code: it comes out once, and nothing is left."""
    number, going = 1, True
    while going:

        def call() -> None:
            with block:
                pass

        came, lines = interrupted_at(number, call, signal.SIGALRM)
        going = lines >= number
        assert interrupts.INTERRUPTS.since is None and came == going, number
        if interrupts.INTERRUPTS.depth:
            pytest.fail(f"line {number}: a block is left open")
        assert signal.getsignal(signal.SIGALRM) is limited, number
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, number
        number += 1
    assert number > 10


@pytest.fixture
def handled():
    """Yield what a handler of the user's was called with."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGINT, before)


def test_a_users_handler_is_called_and_stays(handled: list[int]):
    handler = signal.getsignal(signal.SIGINT)
    with held_back:
        ctrl_c()
        assert not handled
        let_through()
        assert handled == [signal.SIGINT]
        ctrl_c()
    assert len(handled) == 2 and signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_is_set_in_a_block_stays(handled: list[int]):
    other = lambda number, frame: None  # noqa: E731
    with held_back:
        signal.signal(signal.SIGINT, other)
    assert signal.getsignal(signal.SIGINT) is other


def test_ignored_and_fatal_signals_stay_as_they_are(handled: list[int]):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        ctrl_c()
        let_through()


def test_other_threads_hold_nothing_back():
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        with held_back:
            begun.set()
            end.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(10)
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    end.set()
    thread.join()


@pytest.fixture
def locked():
    """Yield a lock that another thread has."""
    lock, begun, end = threading.RLock(), threading.Event(), threading.Event()

    def work() -> None:
        with lock:
            begun.set()
            end.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(10)
    yield lock
    end.set()
    thread.join()


@pytest.mark.timeout(10)
def test_it_is_let_through_while_another_thread_has_the_lock(locked: threading.RLock):
    with held_back:
        ctrl_c()
        with pytest.raises(KeyboardInterrupt), taking(locked):
            pytest.fail("the lock is another's")


def test_whoever_has_the_lock_gives_it_back():
    lock, done = threading.RLock(), []
    with pytest.raises(KeyboardInterrupt), taking(lock):
        ctrl_c()
        let_through()
    with pytest.raises(KeyboardInterrupt), taking(lock):
        ctrl_c()
        done.append("whole")
    assert done == ["whole"]
    other = threading.Thread(target=lambda: done.append(lock.acquire(blocking=False)))
    other.start()
    other.join()
    assert done[-1]


def test_a_child_that_another_thread_forks_holds_nothing_back():
    codes: list[int] = []

    def work() -> None:
        child = os.fork()
        if child == 0:
            try:
                ctrl_c()
            except KeyboardInterrupt:
                os._exit(3)
            finally:
                os._exit(4)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with held_back:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert codes == [3]


@pytest.mark.parametrize("block", [held_back, sealed, finalizing])
def test_a_finalizer_runs_while_a_block_begins_or_ends(block: interrupts.Block, monkeypatch: pytest.MonkeyPatch):
    """The garbage collector may call one at any allocation; the earlier handlers are in force afterwards."""
    set_handler = interrupts._set
    signal.signal(signal.SIGUSR2, lambda *_: None)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR2)]
    finalized = []

    def set_and_collect(number: int, handler: interrupts.Handler) -> object:
        with finalizing:
            finalized.append(number)
        earlier = set_handler(number, handler)
        with finalizing:
            pass
        return earlier

    monkeypatch.setattr(interrupts, "_set", set_and_collect)
    try:
        with block:
            assert interrupts.INTERRUPTS.depth == 1
        assert len(finalized) >= 4 and interrupts.INTERRUPTS.depth == 0
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR2)] == handlers
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
