"""The checkpoints of a run: saved now and then, the last ones kept, and the newest resumed."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.arguments import check_model, check_path
from zinf_fx.checkpoint.background import BackgroundCopy, DeferredSave, deferred_save
from zinf_fx.checkpoint.catalog import (
    STEP,
    CheckpointDirectory,
    checkpoints_in,
    discard_all,
    give_back_unnamed,
    is_numbered,
    name_of,
)
from zinf_fx.checkpoint.entries import StateEntries, state_entries
from zinf_fx.checkpoint.files import FILES, Files
from zinf_fx.checkpoint.load import load_checkpoint
from zinf_fx.checkpoint.manifest import Manifests
from zinf_fx.checkpoint.models import all_ranks, together
from zinf_fx.checkpoint.save import Background, save
from zinf_fx.config import parse_rate
from zinf_fx.cycles import no_search_for_cycles
from zinf_fx.errors import CheckpointError, ConfigError, DamagedCheckpointError, ZinfError

log = logging.getLogger("zinf_fx")

_NAME = re.compile(r"(?!step-\d+$)[A-Za-z0-9][\w.-]*")


class CheckpointManager:
    """Saves a training every so many steps or minutes, each time to a directory of its own, and keeps the last ones.

    ```
    with zinf_fx.CheckpointManager("runs/gpt", model, optimizer, every_steps=500, scheduler=scheduler) as checkpoints:
        for step in range(checkpoints.resume(), 100_000):
            ...
            checkpoints.after_step(step + 1)
    ```

    In the `with` block, SIGTERM lets the step under way end: `after_step` saves then, and raises SystemExit(143). A
    second SIGTERM ends the process as it would outside.

    All ranks of torch.distributed call all of it at the same points. With several, `after_step` asks each time whether
    any of them was told to end.

    Attributes:
        values: the plain values of the checkpoint that was resumed from.
        files: what is done to files.
    """

    files: Files = FILES

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: Optimizer | None = None,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        bandwidth: float | str | None = None,
        **extra: object,
    ) -> None:
        """`directory`: a relative one is meant from the working directory at this moment. `keep`: how many there are at
        most, besides those with names. `bandwidth`: bytes per second, such as "1GB/s", that are copied in the
        background, at most; None: what leaves training most of its disks. `extra`: as of `save_checkpoint`.

        Raises: ConfigError for numbers that can't be meant.
        """
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes), ("keep", keep)):
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ConfigError(f"{name}={value!r} is not accepted: give a number above 0")
        if STEP in extra:
            raise ConfigError(f"'{STEP}' is what the manager saves the number of steps as: choose another name")
        check_path(directory, "CheckpointManager")
        check_model(model, "CheckpointManager")
        self.directory = Path(directory).absolute()
        self.values: dict[str, Any] = {}
        self._model, self._optimizer, self._extra = model, optimizer, extra
        self._every_steps, self._every_minutes, self._keep = every_steps, every_minutes, keep
        self._manifests = Manifests()
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None
        self._terminated = False
        self._handler: Any = None
        self._deferred: DeferredSave | None = None
        self._background = Background(None if bandwidth is None else parse_rate(bandwidth, "bandwidth"))
        self._copy: BackgroundCopy | None = None
        self._failed: BaseException | None = None  # why a copy or a deferred save failed, and nobody was told

    def resume(self) -> int:
        """Load the newest whole checkpoint, whatever its name, and return the number of its step; 0: there is none.

        Where bytes of one turn out to be damaged, the one before is taken, and a warning says so.

        Raises: CheckpointError for one that doesn't fit the training, and when there are some, but none is whole.
        """
        self.close()
        ranks = all_ranks(self._model)
        with together(f"looking for checkpoints in {self.directory.name}", ranks):
            checkpoints = self._checkpoints() if ranks.rank == 0 else []
        candidates = [
            (str(checkpoint.path), checkpoint.step, checkpoint.damage)
            for checkpoint in reversed(checkpoints)
            if checkpoint.step is not None or checkpoint.damage
        ]
        damaged = None
        for path, step, damage in ranks.of_first(candidates, "the checkpoints to resume from"):
            damage = damage or self._load(path)
            if damage is None:
                log.info("resumed from %s, after step %d", path, step)
                self._saved_step, self._saved_at = step, time.monotonic()
                return step
            log.warning("not resumed from %s: %s", path, damage)
            damaged = damaged or damage
        if damaged is not None:
            raise CheckpointError(
                f"no checkpoint in {self.directory} is whole, and training can't be resumed. Of the newest: {damaged}. "
                "To begin anew, choose another directory"
            )
        return 0

    def after_step(self, step: int) -> Path | None:
        """Say that so many steps are done. Saves if it is time to; returns the directory then.

        In the `with` block, where the step still goes on in the background, the checkpoint is there when the next step
        begins: see [Note: deferred saves]. It has what there is now; only what is written to stored tensors by other
        means than steps, until then, is in it, too. Where bytes have to be copied, because the directory is on another
        file system, that goes on in the background, on one rank: see [Note: copies in the background]. The next call
        raises what fails of either.

        Raises: as `save_checkpoint`; SystemExit when the process was told to end, once that is saved.
        """
        self._finish_deferred()
        if self._copy is not None and self._copy.is_over:
            self._finish_copy()
        is_due, ends = self._agreed(self._is_due(step))
        if ends:
            self._finish_copy()
        path = None
        if is_due or (ends and step != self._saved_step):
            goes_on = self._handler is not None and not ends
            path, entries = self.directory / name_of(step), self._entries(step)
            if goes_on:
                self._deferred = deferred_save(
                    entries, lambda entries: self._save(step, path.name, entries, self._background)
                )
            if self._deferred is None:
                self._save(step, path.name, entries, self._background if goes_on else None)
        if ends:
            log.warning("ended by SIGTERM after step %d, which is saved", step)
            self._terminated = False  # no more than that was asked for
            raise SystemExit(128 + signal.SIGTERM)
        self._raise_failed()
        return path

    def save(self, step: int, name: str | None = None) -> Path:
        """Save what there is after so many steps; under a name, it stays until somebody removes it. Returns the
        directory, when the checkpoint is on the disk. Raises: as `save_checkpoint`; ConfigError for what is no name."""
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name for a checkpoint: give letters, digits, '_', '.' and '-'")
        self._finish_deferred()
        path = self._save(step, name or name_of(step), self._entries(step))
        self._raise_failed()
        return path

    def close(self) -> None:
        """Finish what was due, and what is copied in the background. The end of the `with` block does. Raises: as
        `save_checkpoint`."""
        self._finish_deferred()
        self._finish_copy()
        self._raise_failed()

    def _entries(self, step: int) -> StateEntries:
        return state_entries(self._model, self._optimizer, {**self._extra, STEP: step})

    @no_search_for_cycles()
    def _save(self, step: int, name: str, entries: StateEntries, background: Background | None = None) -> Path:
        """Save. `background`: how it may be copied in the background; None: it is there when this returns."""
        self._finish_copy()
        path, ranks = self.directory / name, all_ranks(self._model)
        with together(f"looking for checkpoints in {self.directory.name}", ranks):
            before = self._collect_garbage() if ranks.rank == 0 else []
        replaced = ranks.of_first(self._replaced(before, path), "which checkpoints are replaced")
        newest = max((checkpoint.manifest.time for checkpoint in before if checkpoint.manifest), default=None)
        directories = [Path(replaced_path) for replaced_path in replaced]
        how = {"newest": newest, "replaced": directories, "background": background, "manifests": self._manifests}
        self._copy = save(path, entries, self.files, **how)
        self._saved_step, self._saved_at = step, time.monotonic()
        return path

    def __enter__(self) -> CheckpointManager:
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        self._restore()
        try:
            self.close()
        except ZinfError as failed:
            if error is None:
                raise
            error.add_note(f"and then the checkpoint that was due could not be saved: {failed}")
        if self._terminated and error is None:  # no step ended meanwhile
            signal.raise_signal(signal.SIGTERM)

    def _finish_deferred(self) -> None:
        """Save what was due after an earlier step, if it waits; remember why that failed, if it did."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred.finish()
            self._failed = self._failed or deferred.failure

    def _finish_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is None:
            return
        waited = 0.0
        try:
            waited = copy.wait()
        except BaseException:  # an interrupt: the copy goes on
            self._copy = copy
            raise
        if waited > 1:
            log.info("waited %.1f s for the checkpoint that was copied in the background", waited)
        if copy.failure is not None:
            self._saved_step, self._failed = None, copy.failure

    def _raise_failed(self) -> None:
        """Raise why a copy or a save that waited failed, once."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _checkpoints(self) -> list[CheckpointDirectory]:
        """Return the checkpoints of the run, from the oldest to the newest; not what was never one."""
        return [checkpoint for checkpoint in self._directories() if not checkpoint.is_left_over]

    def _collect_garbage(self) -> list[CheckpointDirectory]:
        """Remove what is left of saves that were cut off, and of stores that are gone. Returns the checkpoints."""
        directories = self._directories()
        discard_all(left.path for left in directories if left.is_numbered and left.is_left_over)
        checkpoints = [checkpoint for checkpoint in directories if not checkpoint.is_left_over]
        give_back_unnamed(checkpoints)
        return checkpoints

    def _directories(self) -> list[CheckpointDirectory]:
        return checkpoints_in(self.directory, self._manifests.read) if self.directory.exists() else []

    def _load(self, path: str) -> str | None:
        try:
            self.values = load_checkpoint(path, self._model, self._optimizer, **self._extra)
        except DamagedCheckpointError as error:
            return str(error)
        self.values.pop(STEP)
        return None

    def _is_due(self, step: int) -> bool:
        if self._every_steps is not None and step % self._every_steps == 0:
            return True
        return self._every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self._every_minutes

    def _agreed(self, is_due: bool) -> tuple[bool, bool]:
        """Return whether it is time to save, as the first rank finds, and whether any was told to end."""
        of_ranks = all_ranks(self._model).of_all((is_due, self._terminated), "whether to save a checkpoint")
        return of_ranks[0][0], any(ends for _, ends in of_ranks)

    def _replaced(self, before: list[CheckpointDirectory], saved: Path) -> list[str]:
        """Return the checkpoints to remove when there is one more, so that no more stay than are to be kept."""
        older = [str(old.path) for old in before if old.is_numbered and old.is_whole and old.path != saved]
        kept = self._keep - is_numbered(saved)
        return older[: max(0, len(older) - kept)]

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._restore()  # the next one ends the process
        self._terminated = True

    def _restore(self) -> None:
        signal.signal(signal.SIGTERM, self._handler)
