"""[Note: threads] Graph runs of this process go one after the other, whichever thread they run in.

They share tiles in memory, regions of the arenas, the order in which stages follow each other, and what is known of
each parameter's gradient: whether one is there to add to, how many backward passes are due. A run that finds these as
the last one left them is right in any order of runs; two at once would have to agree at every operator. So
`RUNNING.lock` is held for a whole run, and by whatever else changes these: an optimizer's step, a gradient that eager
autograd leaves, the reservation of a plan's memory, and an operation that writes to stored tensors. Autograd runs the
backward graphs of CUDA tensors in threads of its own: nothing that holds the lock may wait for a backward pass. Dynamo
compiles for one thread at a time: nothing that compiles may wait for this lock, as its holder may be about to compile.

A run may wait for other ranks meanwhile. Ranks that run several such graphs in threads may take turns in different
orders, and wait for each other: what is collective belongs in one thread of each rank. So may eager reads and writes of
what is divided over ranks, which take turns too, with `Tiers.moving`.

Whoever holds it may take, in this order, the turn of `Tiers.moving`, and the lock of a step, of a memory, or of a
storage, and not the other way round.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from zinf_fx.interrupts import taking


class Exclusive:
    """The lock, for `with RUNNING.turn()`. A process made by fork has its own: the holder may not be in it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    def turn(self) -> AbstractContextManager[None]:
        """A block that has the lock; an interrupt can't leave it locked. See [Note: interrupts]."""
        return taking(self.lock)

    def _renew(self) -> None:
        self.lock = threading.RLock()


RUNNING = Exclusive()
