"""A save that is due while a step goes on in the background: it waits until the next one is about to begin.

[Note: saves that wait]
A save has to wait for the step's last write, and if it did so at once, the next forward pass, which hides that, would
wait, too. But until the next step begins, nothing that it saves of the store is changed. So what forward and backward
do change is held as it is: buffers, random states, schedulers, options of the optimizer. The save itself is made from
a hook in front of the next step, or whenever somebody asks for it before that. Where it fails in the hook, the step is
taken all the same, and whoever wanted the save is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from zinf_fx.checkpoint.agreement import all_ranks
from zinf_fx.checkpoint.training.contents import Parts, streamed_in
from zinf_fx.checkpoint.training.parts.gradients import GradientsPart
from zinf_fx.checkpoint.training.parts.held import HeldPart, TooLargeError
from zinf_fx.checkpoint.training.parts.optimizer import OptimizerPart
from zinf_fx.optim.streamed import Streamed
from zinf_fx.runtime.tensor.local_parameter import stored_parameter

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
            name: part if isinstance(part, OptimizerPart) else HeldPart(part) for name, part in parts.items()
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
    if not any(_goes_on(one) for one in streamed) or parts[GradientsPart.name].is_filled:
        return None
    try:
        return HeldSave(parts, save)
    except TooLargeError:
        return None


def _goes_on(optimizer: Streamed) -> bool:
    """Whether a step goes on in the background where any of the parameters live."""
    stored = (stored_parameter(p) for group in optimizer.param_groups for p in group["params"])
    return any(one is not None and one.storage.tiers.background is not None for one in stored)
