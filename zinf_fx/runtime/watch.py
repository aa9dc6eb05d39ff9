"""Collectives of tensors of a device are named in the log when they take long: no thread of Python waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import torch.distributed as dist

log = logging.getLogger("zinf_fx")

# Of the time that a collective may take: the watchdog of NCCL, which knows no tile, ends the process after all of it.
_SHARE = 0.1
_LOOKS = 10  # in that time


class Watch:
    """Looks after the collectives that one rank has queued, in a thread that is there while there are any."""

    def __init__(self, who: str, timeout: float) -> None:
        """`who`: the rank, for messages; `timeout`: seconds that a collective may take."""
        self._who, self._patience = who, timeout * _SHARE
        self._queued: deque[tuple[dist.Work, str]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work, what: str) -> None:
        """A collective was queued behind those before it. `what` names it and the tile."""
        with self._lock:
            self._queued.append((work, what))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look_after, name="zinf-collectives", daemon=True)
                self._thread.start()

    def _look_after(self) -> None:
        since, named = time.monotonic(), False
        while True:
            time.sleep(self._patience / _LOOKS)
            with self._lock:
                while self._queued and self._queued[0][0].is_completed():
                    self._queued.popleft()
                    since, named = time.monotonic(), False
                if not self._queued:
                    self._thread = None
                    return
                _, what = self._queued[0]
            if not named and time.monotonic() - since > self._patience:
                named = True
                log.warning(
                    "%s has waited %.3g s for %s: another rank ended, or does something else at this point, or its "
                    "device computes something for so long",
                    self._who,
                    time.monotonic() - since,
                    what,
                )
