"""[Note: beside] Where a device computes apart from the CPU, the CPU's update of parameters has a thread of its own.

What launches kernels adds parameters to the step, and goes on: the thread waits for their gradients and states, updates
them and writes them back. Whoever needs a parameter waits for its chunk alone, and where the thread has nothing to do
(in backward, until a chunk is full), does the work itself. Where the CPU computes, there is no such thread: two would
share its cores, so that work goes on between operators; so it does where no thread can be started.

What goes wrong in the thread is raised by the next call of the step that comes from another one, which ends the step.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from zinf_fx.interrupts import let_through
from zinf_fx.runtime.memory.device import Device

# Seconds for which one waits for the thread before an interrupt is let through.
_SLICE = 0.05


class Beside:
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
        """There may be something to do. Returns whether the thread is there to do it: not when it has failed, nor where
        none can be started."""
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
