"""Finalizers that give back what objects held, whatever interrupts them."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable

from zinf_fx.interrupts import finalizing


class _Finalizer(weakref.ref):
    """Gives something back when its owner is gone. (One object: the garbage collector counts them.)"""

    __slots__ = ("give_back", "pid")
    give_back: Callable[[], None]
    pid: int


_pending: dict[int, _Finalizer] = {}  # by their ids: an owner may be nothing that can be hashed


def finalize(owner: object, give_back: Callable[[], None]) -> None:
    """Call `give_back` when `owner` is gone. Not at exit, when everything goes, nor in a process made by fork, where
    nothing is to be given back.

    `weakref.finalize` forgets what to do before it begins to do it. Python drops an exception that comes meanwhile, and
    Ctrl-C would leave memory taken for ever. Here it is left to `run_interrupted_finalizers`.
    """
    finalizer = _Finalizer(owner, _run)
    finalizer.give_back, finalizer.pid = give_back, os.getpid()
    _pending[id(finalizer)] = finalizer


def run_interrupted_finalizers() -> None:
    """Run the finalizers that an interrupt kept from running."""
    for finalizer in list(_pending.values()):
        if finalizer() is None:
            _run(finalizer)


@finalizing
def _run(finalizer: _Finalizer) -> None:
    if _pending.pop(id(finalizer), None) is not None and os.getpid() == finalizer.pid:
        finalizer.give_back()


atexit.register(_pending.clear)
