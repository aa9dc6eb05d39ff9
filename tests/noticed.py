"""A lock that tells when a thread waits for it."""

from __future__ import annotations

import threading


class Noticed:
    """Takes the place of another lock. `is_asked_for`: whether a thread ever found it taken by another."""

    def __init__(self) -> None:
        self._lock, self.is_asked_for = threading.RLock(), threading.Event()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self.is_asked_for.set()
        return blocking and self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()
