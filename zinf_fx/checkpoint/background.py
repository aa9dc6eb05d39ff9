"""A save that goes on behind training, in a thread of its own, at a pace that leaves training its disks.

[Note: copies behind training]
To another file system, bytes have to be copied. What is in the store is kept there as it is when the save is due, as
for a generation (see `frozen`), and steps go on at once, which write elsewhere. A thread copies what is kept, and then
commits as other saves do: until that, the checkpoint before is the checkpoint. What is kept is released behind it.
The interpreter waits for the thread when it exits. What fails removes what was begun, and is raised where the training
comes by next.

[Note: saves that wait]
A save has to wait for the step's last write, and if it did so at once, the next forward pass, which hides that, would
wait, too. But until the next step begins, nothing that it saves of the store is changed. So what forward and backward
do change is held as it is: buffers, random states, schedulers, options of the optimizer. The save itself is made from
a hook in front of the next step, or whenever somebody asks for it before that. Where it fails in the hook, the step is
taken all the same, and whoever wanted the save is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from zinf_fx.checkpoint.entries import GradientsPart, HeldPart, OptimizerPart, Parts, TooLargeError, streamed_in
from zinf_fx.checkpoint.models import all_ranks
from zinf_fx.optim.streamed import Streamed
from zinf_fx.runtime.tensor.local_parameter import stored_parameter

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

    def __init__(self, moved_by_others: Callable[[], int], bandwidth: float | None = None) -> None:
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
        assert complete is not None
        try:
            complete()
        except BaseException as error:
            self.failure = error
            log.error("%s failed, and training goes on without it: %s", self._what, error)


log = logging.getLogger("zinf_fx")


class HeldSave:
    """A save that waits for the next step of any of its optimizers.

    Attributes:
        failure: why it could not be made before that step, if so.
    """

    def __init__(self, parts: Parts, save: Callable[[Parts], object]) -> None:
        """Raises: TooLargeError; CheckpointError for what can't be saved."""
        self._save, self.failure = save, None
        self._parts: Parts | None = {
            name: part if isinstance(part, (OptimizerPart, HeldPart)) else HeldPart(part)
            for name, part in parts.items()
        }
        for part in self._parts.values():
            if isinstance(part, OptimizerPart):
                part.hold_options()
        self._hooks: list[RemovableHandle] = []
        for optimizer in streamed_in(parts):
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._save_before_step()))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(lambda *_: self._drop()))

    def finish(self) -> None:
        """Save, if that has not been done. Raises: as `save_checkpoint`."""
        for hook in self._hooks:  # not in a hook, whose caller goes through all of them
            hook.remove()
        self._save_once()

    def _save_before_step(self) -> None:
        try:
            self._save_once()
        except Exception as error:
            log.warning("a checkpoint that was due could not be saved before the step that followed: %s", error)
            self.failure = error

    def _save_once(self) -> None:
        if (parts := self._taken()) is not None:
            self._save(parts)

    def _drop(self) -> None:
        """Another state is loaded: the one that was to be saved is gone."""
        if self._taken() is not None:
            log.warning("a checkpoint that was due is not saved: another one was loaded before the next step began")

    def _taken(self) -> Parts | None:
        """What is to be saved, the first time."""
        parts, self._parts = self._parts, None
        return parts


def held(parts: Parts, save: Callable[[Parts], object]) -> HeldSave | None:
    """A save that waits, if that is of any use: see [Note: saves that wait]. None where it is to be made at once:
    nothing goes on in the background; there are several ranks, which would have to agree; there are gradients, or much
    else that changes without a step; or backward is what begins the next one.

    Raises: CheckpointError for what can't be saved.
    """
    optimizers = [part.optimizer for part in parts.values() if isinstance(part, OptimizerPart)]
    streamed = streamed_in(parts)
    if all_ranks().size > 1 or len(streamed) < len(optimizers) or any(one.step_in_backward for one in streamed):
        return None
    gradients = parts[GradientsPart.name]
    assert isinstance(gradients, GradientsPart)
    if not any(_goes_on(one) for one in streamed) or gradients.is_filled:
        return None
    try:
        return HeldSave(parts, save)
    except TooLargeError:
        return None


def _goes_on(optimizer: Streamed) -> bool:
    """Whether a step goes on in the background where any of the parameters live."""
    stored = (stored_parameter(p) for group in optimizer.param_groups for p in group["params"])
    return any(one is not None and one.storage.tiers.background is not None for one in stored)
