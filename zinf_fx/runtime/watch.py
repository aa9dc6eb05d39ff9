"""Collectives of tensors of a device are named in the log when they take long: no thread of Python waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch.distributed as dist

log = logging.getLogger("zinf_fx")

# Of the time that a collective may take: the watchdog of NCCL, which knows no tile, ends the process after all of it.
_SHARE = 0.1
_LOOKS = 10  # in that time


class Queued:
    """A collective in the queue of a device.

    Attributes:
        what: names it and the tile.
        is_over: whether it is, asked in any thread.
    """

    def __init__(self, work: dist.Work, what: str, mark: Callable[[], Callable[[], bool]]) -> None:
        """`mark`: of the device, as `Device.mark`."""
        self.what, self._mark = what, mark
        self.is_over: Callable[[], bool] = work.is_completed

    def joined(self) -> None:
        """What this thread queues from now on follows it. So does a mark there, and its `Work` may go, which owns the
        memory that it moves: however far the program runs ahead, that memory is somebody else's from now on."""
        self.is_over = self._mark()


class Watch:
    """Looks after the collectives that one rank has queued, in a thread that is there while there are any."""

    def __init__(self, who: str, timeout: float) -> None:
        """`who`: the rank, for messages; `timeout`: seconds that a collective may take."""
        self._who, self._patience = who, timeout * _SHARE
        self._queued: deque[Queued] = deque()
        self._since, self._named = 0.0, False  # when the first one became that; whether the log has named it
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work, what: str, mark: Callable[[], Callable[[], bool]]) -> Queued:
        """A collective was queued behind those before it. `what` names it and the tile; `mark`: as of `Queued`."""
        queued = Queued(work, what, mark)
        with self._lock:
            self._let_go_of_completed()
            self._queued.append(queued)
            if self._thread is None or not self._thread.is_alive():
                self._since, self._named = time.monotonic(), False
                self._thread = threading.Thread(target=self._look_after, name="zinf-collectives", daemon=True)
                self._thread.start()
        return queued

    def _let_go_of_completed(self) -> None:
        while self._queued and self._queued[0].is_over():
            self._queued.popleft()
            self._since, self._named = time.monotonic(), False

    def _look_after(self) -> None:
        while True:
            time.sleep(self._patience / _LOOKS)
            with self._lock:
                self._let_go_of_completed()
                if not self._queued:
                    self._thread = None
                    return
                waited, what = time.monotonic() - self._since, self._queued[0].what
                if self._named or waited <= self._patience:
                    continue
                self._named = True
            log.warning(
                "%s has waited %.3g s for %s: another rank ended, or does something else at this point, or its "
                "device computes something for so long",
                self._who,
                waited,
                what,
            )
