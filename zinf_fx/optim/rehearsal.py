"""Before a step changes anything, the class steps stand-ins, by the options that the optimizer's groups have now.

So options that the class can't compute with, which a scheduler or a program has set since construction, are refused
while the step can still be left. And it shows what the class changes besides parameters and states: each chunk is
updated by a borrowed optimizer that begins from what was before, and the optimizer itself gets that when the step is
taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.errors import OptimizerError
from zinf_fx.optim.arithmetic import Group, Kept, borrow, copied, same_value, step_without_hooks

# Options for which only the type of a number counts: no arithmetic fails for some learning rates alone.
_TYPE_COUNTS = {"lr", "initial_lr"}

# Elements of a stand-in along each dimension, at most.
_ELEMENTS = 3


def check_honoured(group: Group) -> None:
    """Raises: OptimizerError for options of a group that have no meaning for values that aren't in one memory."""
    for option in ("capturable", "differentiable"):
        if group.get(option):
            raise OptimizerError(f"{option}=True can't be honoured for stored parameters: leave it out")


class Rehearsal:
    """Steps of a class over stand-ins for the parameters of one optimizer.

    Attributes:
        moving: the names of options that steps have changed.
    """

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        # What classes of PyTorch change is in their states, so that they are tried when options change.
        self._changes_states_alone = kind.__module__.startswith("torch.optim.")
        self._passed: list[dict[str, Any]] | None = None  # options of each group
        self._moved: Kept | None = None
        self.moving: set[str] = set()

    def repeat(self, optimizer: Optimizer) -> None:
        """Step stand-ins again, if the class has stepped any. Where that fails, it is the options that are wrong."""
        if self._passed is not None:
            self.run(optimizer)

    def run(self, optimizer: Optimizer) -> None:
        """Step stand-ins. Raises: OptimizerError where that fails; nothing is changed then."""
        self._moved = None
        options = [{k: _what_counts(k, v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        if self._changes_states_alone and self._passed is not None and same_value_of_groups(options, self._passed):
            return
        for group in optimizer.param_groups:
            check_honoured(group)
        inner = borrow(optimizer, self._kind, {}, [])
        for scaling in ("grad_scale", "found_inf"):  # a GradScaler's, where the gradients are
            vars(inner).pop(scaling, None)
        inner.param_groups = [{**_on_the_cpu(group), "params": _stand_ins(group)} for group in optimizer.param_groups]
        before = Kept.of(inner)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                step_without_hooks(inner)
        except Exception as error:
            raise OptimizerError(
                f"{self._kind.__qualname__} can't step with the options that its groups have now, so no parameter was "
                f"changed ({type(error).__name__}: {error}): look at {_shown(optimizer.param_groups)}"
            ) from error
        self._passed, self._moved = options, Kept.of(inner).since(before)
        self.moving |= self._moved.options

    def take_over(self, optimizer: Optimizer) -> None:
        """After the step, let `optimizer` have what that changes besides parameters and states."""
        moved, self._moved = self._moved, None
        if moved is not None:
            moved.set_in(optimizer)


def same_value_of_groups(groups: Sequence[dict[str, Any]], other_groups: Sequence[dict[str, Any]]) -> bool:
    """Whether groups have the same options, of the same values."""
    return len(groups) == len(other_groups) and all(
        mine.keys() == theirs.keys() and all(same_value(value, theirs[name]) for name, value in mine.items())
        for mine, theirs in zip(groups, other_groups, strict=True)
    )


def _what_counts(name: str, value: object) -> object:
    return type(value) if name in _TYPE_COUNTS and not isinstance(value, torch.Tensor) else value


def _on_the_cpu(group: Group) -> Group:
    options = copied({name: value for name, value in group.items() if name != "params"})
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _stand_ins(group: Group) -> list[torch.Tensor]:
    """Make a small parameter of as many dimensions as the group's first, with a gradient."""
    stand_ins = [torch.ones([min(size, _ELEMENTS) for size in p.shape], device="cpu") for p in group["params"][:1]]
    for stand_in in stand_ins:
        stand_in.grad = torch.full_like(stand_in, 0.25)
    return stand_ins


def _shown(groups: Sequence[Group]) -> str:
    options = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
    return "; ".join(f"group {number}: {values}" for number, values in enumerate(options))
