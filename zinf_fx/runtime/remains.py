"""What objects leave behind is given back when they are gone, whatever interrupts that."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable

from zinf_fx.interrupts import finalizing

# By the id of the reference: an owner may be nothing that can be hashed.
_waiting: dict[int, tuple[weakref.ref[object], Callable[[], None]]] = {}


def when_gone(owner: object, give_back: Callable[[], None]) -> None:
    """Call `give_back` when `owner` is gone. Not at exit, when everything goes.

    `weakref.finalize` forgets what to do before it begins to do it. Python drops an exception that comes meanwhile, and
    Ctrl-C would leave memory taken for ever. Here it is left to `give_back_remains`.
    """
    reference = weakref.ref(owner, _give_back)
    _waiting[id(reference)] = reference, give_back


def give_back_remains() -> None:
    """Do what an interrupt kept from being done."""
    for reference, _ in list(_waiting.values()):
        if reference() is None:
            _give_back(reference)


@finalizing
def _give_back(reference: weakref.ref[object]) -> None:
    _, give_back = _waiting.pop(id(reference), (None, None))
    if give_back is not None:
        give_back()


atexit.register(_waiting.clear)
