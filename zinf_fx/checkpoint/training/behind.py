"""A save that goes on behind training, in a thread of its own, at a pace that leaves training its disks.

[Note: copies behind training]
To another file system, bytes have to be copied. What is in the store is kept there as it is when the save is due, as
for a generation (see `frozen`), and steps go on at once, which write elsewhere. A thread copies what is kept, and then
commits as other saves do: until that, the checkpoint before is the checkpoint. What is kept is released behind it.
The interpreter waits for the thread when it exits. What fails removes what was begun, and is raised where the training
comes by next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("zinf_fx")

SHARE = 0.15
"""Of the time in which training moves bytes, that in which copies move some, too."""

_NOTICED = 32 << 20
"""Bytes that training has to move to be noticed: more than are under way of a copy."""

_REMEMBERED = 1.0
"""Seconds for which training counts as moving bytes after that was noticed."""


class Pace:
    """When a copy may go on.

    Without a bandwidth, it goes on for SHARE of the time while others move bytes, and all the time while nobody does.
    """

    def __init__(self, moved_by_others: Callable[[], int], bandwidth: int | None = None) -> None:
        """`moved_by_others`: bytes so far; `bandwidth`: bytes per second that are copied at most."""
        self._moved_by_others, self._bandwidth = moved_by_others, bandwidth
        self._seen, self._seen_at = moved_by_others(), -_REMEMBERED
        self._began = time.monotonic()
        self._hurries = threading.Event()

    def hurry(self) -> None:
        """Somebody waits for the copy."""
        self._hurries.set()

    def keep(self, nbytes: int) -> None:
        """So many bytes were copied: return when the next may be."""
        taken = time.monotonic() - self._began
        self._hurries.wait(max(0.0, self._pause(nbytes, taken)))
        self._began = time.monotonic()

    def _pause(self, nbytes: int, taken: float) -> float:
        """Seconds, behind bytes whose copy took some."""
        if self._bandwidth is not None:
            return nbytes / self._bandwidth - taken
        moved = self._moved_by_others()
        if moved > self._seen + _NOTICED:
            self._seen, self._seen_at = moved, time.monotonic()
        return taken * (1 / SHARE - 1) if time.monotonic() - self._seen_at < _REMEMBERED else 0.0


class CopyBehind:
    """A copy that goes on in a thread.

    Attributes:
        failure: why it failed, once it is over.
    """

    def __init__(self, what: str, complete: Callable[[], object], pace: Pace) -> None:
        """Begin it. `what` names it in errors. Raises: RuntimeError where there can't be one more thread."""
        self.failure: BaseException | None = None
        self._what, self._complete, self._pace = what, complete, pace
        self._thread = threading.Thread(target=self._run, name="zinf-copy", daemon=False)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> float:
        """Return when it is over, as soon as the disks allow. Returns the seconds that took."""
        started = time.monotonic()
        self._pace.hurry()
        self._thread.join()
        return time.monotonic() - started

    def _run(self) -> None:
        complete, self._complete = self._complete, None
        try:
            complete()
        except BaseException as error:
            self.failure = error
            log.error("%s failed, and training goes on without it: %s", self._what, error)
