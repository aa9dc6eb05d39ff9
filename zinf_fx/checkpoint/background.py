"""Saves that take no time from training: copies in the background, and saves that wait for the next step.

[Note: copies in the background]
To another file system, bytes have to be copied. A snapshot keeps what is in the store as it is when the save is due,
and steps go on at once, which write elsewhere: see [Note: sharing]. A thread copies what is kept, and then commits as
other saves do: until that, the checkpoint before is the checkpoint. The snapshot is released behind it. The interpreter
waits for the thread when it exits. A copy that fails removes what was begun, and its error is raised at the next call.

[Note: deferred saves]
A save has to wait for the step's last write, and if it did so at once, the next forward pass, which hides that, would
wait, too. But until the next step begins, nothing that it saves of the store is changed. So what forward and backward
do change is copied: buffers, random states, schedulers, options of the optimizer. The save itself is made from a hook
in front of the next step, or whenever somebody asks for it before that. Where it fails in the hook, the step is taken
all the same, and the next call raises the error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from zinf_fx.checkpoint.entries import (
    EntrySnapshot,
    GradientsEntry,
    OptimizerEntry,
    StateEntries,
    TooLargeError,
    streamed_in,
)
from zinf_fx.checkpoint.models import all_ranks
from zinf_fx.optim.streamed import Streamed
from zinf_fx.runtime.tensor.local_parameter import stored_parameter

log = logging.getLogger("zinf_fx")

SHARE = 0.15
"""The share of the time in which training moves bytes, in which copies move some, too."""

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
        """Copy as fast as possible from now on: somebody waits."""
        self._hurries.set()

    def keep(self, nbytes: int) -> None:
        """Note that so many bytes were copied, and return when the next ones may be."""
        taken = time.monotonic() - self._began
        self._hurries.wait(max(0.0, self._pause(nbytes, taken)))
        self._began = time.monotonic()

    def _pause(self, nbytes: int, taken: float) -> float:
        """Return the seconds to wait after a copy of so many bytes that took `taken` seconds."""
        if self._bandwidth is not None:
            return nbytes / self._bandwidth - taken
        moved = self._moved_by_others()
        if moved > self._seen + _NOTICED:
            self._seen, self._seen_at = moved, time.monotonic()
        return taken * (1 / SHARE - 1) if time.monotonic() - self._seen_at < _REMEMBERED else 0.0


class BackgroundCopy:
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


class DeferredSave:
    """A save that waits for the next step of any of its optimizers.

    Attributes:
        failure: why it could not be made before that step, if so.
    """

    def __init__(self, entries: StateEntries, save: Callable[[StateEntries], object]) -> None:
        """Raises: TooLargeError; CheckpointError for what can't be saved."""
        self._save, self.failure = save, None
        self._entries: StateEntries | None = {
            name: entry if isinstance(entry, (OptimizerEntry, EntrySnapshot)) else EntrySnapshot(entry)
            for name, entry in entries.items()
        }
        for entry in self._entries.values():
            if isinstance(entry, OptimizerEntry):
                entry.keep_options()
        self._hooks: list[RemovableHandle] = []
        for optimizer in streamed_in(entries):
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
        if (entries := self._taken()) is not None:
            self._save(entries)

    def _drop(self) -> None:
        """Give the save up: another state is loaded, and the one that was to be saved is gone."""
        if self._taken() is not None:
            log.warning("a checkpoint that was due is not saved: another one was loaded before the next step began")

    def _taken(self) -> StateEntries | None:
        """Return what is to be saved, the first time."""
        entries, self._entries = self._entries, None
        return entries


def deferred_save(entries: StateEntries, save: Callable[[StateEntries], object]) -> DeferredSave | None:
    """Return a save that waits: see [Note: deferred saves]. None where it is to be made at once: nothing goes on in the
    background; there are several ranks, which would have to agree; there are gradients, or much else that changes
    without a step; or backward is what begins the next one.

    Raises: CheckpointError for what can't be saved.
    """
    optimizers = [entry for entry in entries.values() if isinstance(entry, OptimizerEntry)]
    streamed = streamed_in(entries)
    if all_ranks().size > 1 or len(streamed) < len(optimizers) or any(opt.step_in_backward for opt in streamed):
        return None
    gradients = entries[GradientsEntry.name]
    assert isinstance(gradients, GradientsEntry)
    if not any(_goes_on(optimizer) for optimizer in streamed) or gradients.is_filled:
        return None
    try:
        return DeferredSave(entries, save)
    except TooLargeError:
        return None


def _goes_on(optimizer: Streamed) -> bool:
    """Whether a step goes on in the background where any of the parameters live."""
    parameters = (stored_parameter(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return any(stored is not None and stored.stored.tiers.background is not None for stored in parameters)
