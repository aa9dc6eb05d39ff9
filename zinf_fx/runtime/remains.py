"""What objects leave behind is given back when they are gone, whatever interrupts that."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable

from zinf_fx.interrupts import finalizing


class _Remains(weakref.ref):
    """What is to be given back when an owner is gone. (One object: the garbage collector counts them.)"""

    __slots__ = ("give_back", "pid")
    give_back: Callable[[], None]
    pid: int


_waiting: dict[int, _Remains] = {}  # by their ids: an owner may be nothing that can be hashed


def when_gone(owner: object, give_back: Callable[[], None]) -> None:
    """Call `give_back` when `owner` is gone. Not at exit, when everything goes, nor in a process made by fork, where
    nothing is to be given back.

    `weakref.finalize` forgets what to do before it begins to do it. Python drops an exception that comes meanwhile, and
    Ctrl-C would leave memory taken for ever. Here it is left to `give_back_remains`.
    """
    reference = _Remains(owner, _give_back)
    reference.give_back, reference.pid = give_back, os.getpid()
    _waiting[id(reference)] = reference


def give_back_remains() -> None:
    """Do what an interrupt kept from being done."""
    for reference in list(_waiting.values()):
        if reference() is None:
            _give_back(reference)


@finalizing
def _give_back(reference: _Remains) -> None:
    if _waiting.pop(id(reference), None) is not None and os.getpid() == reference.pid:
        reference.give_back()


atexit.register(_waiting.clear)
