"""Plain optimizers over stored parameters that have no operation of their own for it: streamed, or run as they are.

Where parameters, gradients and states live on the device, an optimizer's own code works on them. Elsewhere the stored
parameters are stepped by the optimizer's class as `Streamed` runs it, in the dtype of the parameters, after all of the
user's pre-hooks and the closure; the class's own `step` then finds no gradients of theirs, and steps the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from zinf_fx.errors import OptimizerError
from zinf_fx.interrupts import sealed
from zinf_fx.optim.states import check_reduced
from zinf_fx.optim.streamed import Streamed
from zinf_fx.optim.torn import TornStep
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

Arguments = tuple[tuple, dict[str, Any]]


def runs_in_place(parameters: Sequence[StoredTensor]) -> bool:
    """Whether an optimizer's own code can work on these parameters: all that it touches is on the device."""
    return all(
        p.storage.in_place
        and p.storage.share.ranks.shards == 1
        and {p.storage.placement.gradients, p.storage.placement.optimizer} == {"device"}
        for p in parameters
    )


class PlainSteps:
    """The steps of one plain optimizer over stored parameters that don't run in place."""

    _of: ClassVar[weakref.WeakKeyDictionary[Optimizer, PlainSteps]] = weakref.WeakKeyDictionary()

    def __init__(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        streaming = type(kind.__name__, (Streamed, kind), {"_has_masters": False})
        self._streamed: Streamed = object.__new__(streaming)
        self._streamed.share(optimizer)
        self._last_hook = optimizer.register_step_pre_hook(self._step)
        self._consumed: dict[StoredTensor, torch.Tensor] = {}
        self._others_follow = False  # whether the class's own code has parameters to step behind those that are stored
        optimizer.register_load_state_dict_post_hook(_forget)

    @classmethod
    def of(cls, optimizer: Optimizer) -> PlainSteps:
        """Those of `optimizer`."""
        if optimizer not in cls._of:
            cls._of[optimizer] = cls(optimizer)
        return cls._of[optimizer]

    def begin(self, optimizer: Optimizer) -> None:
        """A step begins. Raises: OptimizerError for a class that can't be streamed, or after a torn step."""
        if self._consumed and all(parameter.grad is None for parameter in self._consumed):
            return  # they are stepped: this is `super().step()`, or what is left after an error
        if self._consumed and self._others_follow:  # the last step ended before they were stepped
            stepped = tuple(f"a parameter of shape {tuple(p.shape)}" for p in self._consumed)
            self._streamed.torn = TornStep("while ordinary parameters were stepped", stepped, (), ())
            self._give_back()
        self._consumed.clear()
        if self._streamed.torn is not None:
            raise OptimizerError(str(self._streamed.torn))
        self._streamed.share(optimizer)
        self._streamed.check()
        self._last_hook.remove()  # the user's hooks come first
        self._last_hook = optimizer.register_step_pre_hook(self._step)

    @classmethod
    def end(cls, optimizer: Optimizer) -> None:
        """A step is over: the gradients are there again."""
        steps = cls._of.get(optimizer)
        if steps is not None:
            steps._give_back()

    def _give_back(self) -> None:
        for parameter, gradient in self._consumed.items():
            if parameter.grad is None:
                parameter.grad = gradient
        self._consumed.clear()

    def _step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> Arguments | None:
        """Step the stored parameters, now or after the closure."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._step_stored()
            return None

        def evaluated() -> Any:
            loss = closure()
            self._step_stored()
            return loss

        return ((args[0], evaluated, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluated})

    @sealed
    def _step_stored(self) -> None:
        parameters = [
            parameter
            for group in self._streamed.param_groups
            for parameter in map(stored_parameter, group["params"])
            if parameter is not None and parameter.grad is not None
        ]
        for parameter in parameters:
            check_reduced(parameter)
        every = (parameter for group in self._streamed.param_groups for parameter in group["params"])
        self._others_follow = any(p.grad is not None for p in every if stored_parameter(p) is None)
        self._streamed.step_stored()
        for parameter in parameters:
            self._consumed[parameter], parameter.grad = parameter.grad, None

    def forget(self) -> None:
        """A state was loaded: the last step counts no more."""
        self._consumed.clear()
        self._streamed.torn = None


def _forget(optimizer: Optimizer) -> None:
    PlainSteps.of(optimizer).forget()
