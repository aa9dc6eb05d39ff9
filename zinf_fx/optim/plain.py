"""Plain optimizers over stored parameters: streamed, or run as they are.

Stored parameters are stepped by the optimizer's class as `Streamed` runs it, after all of the user's pre-hooks and the
closure; the class's own `step` then finds no gradients of theirs, and steps the others. The arithmetic is PyTorch's, in
the dtype of the parameters: states of bf16 parameters are bf16 too, and there is no master copy. The classes of
`zinf_fx.optim` have one.

A class that can't be streamed (LBFGS takes all parameters together) runs its own code where parameters, gradients and
states live on the device: each of its operations works on them there.

Optimizers make states by `zeros_like`, `full_like` or `empty_like` of parameters. Without further arguments these give
a stored tensor on the tier of optimizer states, for any whole stored tensor.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, ClassVar

import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zinf_fx.errors import OptimizerError
from zinf_fx.interrupts import sealed
from zinf_fx.optim.arithmetic import Group
from zinf_fx.optim.elements import fill
from zinf_fx.optim.partial_step import TornStep
from zinf_fx.optim.states import check_reduced
from zinf_fx.optim.streamed import Streamed
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.storage import new_states
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

aten = torch.ops.aten

Arguments = tuple[tuple, dict[str, Any]]


def _in_place(parameters: Sequence[StoredTensor]) -> bool:
    """Whether an optimizer's own code can work on these parameters: all that it touches is on the device."""
    return all(
        p.stored.in_place
        and p.stored.shard.ranks.shards == 1
        and {p.stored.placement.gradients, p.stored.placement.optimizer} == {"device"}
        for p in parameters
    )


class PlainSteps:
    """The steps of one plain optimizer over stored parameters that don't run in place."""

    _of: ClassVar[weakref.WeakKeyDictionary[Optimizer, PlainSteps]] = weakref.WeakKeyDictionary()

    def __init__(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        streaming = type(kind.__name__, (Streamed, kind), {"_has_masters": False, "_step_ordinary": _step_none})
        self._streamed: Streamed = object.__new__(streaming)
        self._streamed.share(optimizer)
        _note_missing_masters(optimizer)
        self._last_hook = optimizer.register_step_pre_hook(self._step)
        self._consumed: dict[StoredTensor, torch.Tensor] = {}
        self._others_follow = False  # whether the class's own code has parameters to step behind those that are stored
        self._runs_itself = False  # because its class can't be streamed
        optimizer.register_load_state_dict_post_hook(_forget)

    @classmethod
    def of(cls, optimizer: Optimizer) -> PlainSteps:
        """Return the steps of `optimizer`."""
        if optimizer not in cls._of:
            cls._of[optimizer] = cls(optimizer)
        return cls._of[optimizer]

    def begin(self, optimizer: Optimizer, parameters: Sequence[StoredTensor]) -> None:
        """Begin a step. `parameters` are those of the optimizer that are stored.

        Raises: OptimizerError for a class that can't be streamed, unless its own code runs; or after a torn step.
        """
        if self._consumed and all(parameter.grad is None for parameter in self._consumed):
            return  # they are stepped: this is `super().step()`, or what is left after an error
        if self._consumed and self._others_follow:  # the last step ended before they were stepped
            stepped = tuple(f"a parameter of shape {tuple(p.shape)}" for p in self._consumed)
            self._streamed.torn = TornStep("while ordinary parameters were stepped", stepped, (), ())
            self._give_back()
        self._consumed.clear()
        if self._streamed.torn is not None:
            raise OptimizerError(str(self._streamed.torn))
        if not (self._runs_itself and _in_place(parameters)):
            self._runs_itself = not self._can_be_streamed(optimizer, parameters)
        self._last_hook.remove()  # the user's hooks come first
        if not self._runs_itself:
            self._last_hook = optimizer.register_step_pre_hook(self._step)
            return
        for parameter in parameters:
            check_reduced(parameter)

    def _can_be_streamed(self, optimizer: Optimizer, parameters: Sequence[StoredTensor]) -> bool:
        """Whether the class can be; if not, its own code can run. Raises: OptimizerError if neither can."""
        self._streamed.share(optimizer)
        self._streamed.rehearsal.repeat(self._streamed)
        try:
            self._streamed.check()
        except OptimizerError:
            if _in_place(parameters):
                return False
            raise
        return True

    @classmethod
    def end(cls, optimizer: Optimizer) -> None:
        """End a step: the gradients are there again."""
        steps = cls._of.get(optimizer)
        if steps is not None:
            steps._give_back()
            steps._streamed.rehearsal.take_over(optimizer)

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
            gradient = parameter.grad
            assert gradient is not None
            self._consumed[parameter], parameter.grad = gradient, None

    def forget(self) -> None:
        """Count the last step no more, because a state was loaded."""
        self._consumed.clear()
        self._streamed.torn = None


def _note_missing_masters(optimizer: Optimizer) -> None:
    """Warn of low-precision parameters, if there are any. Python shows a warning with the same text once."""
    stored = [p for group in optimizer.param_groups for p in map(stored_parameter, group["params"]) if p is not None]
    low = [p.dtype for p in stored if p.dtype.is_floating_point and p.dtype.itemsize < 4]
    if low:
        kind = type(optimizer)
        warnings.warn(
            f"{kind.__module__}.{kind.__qualname__} steps {low[0]} parameters without an fp32 master, so that updates "
            "smaller than half of a value's last place are lost. zinf_fx.optim has PyTorch's classes with masters, the "
            "Trainer of zinf_fx.integrations.transformers takes them, and `class Mine(zinf_fx.optim.Streamed, "
            f"{kind.__qualname__})` makes one of any other",
            stacklevel=6,
        )


def _step_none(optimizer: Streamed, groups: list[Group]) -> list[torch.Tensor]:
    """Step none: the class's own code steps ordinary parameters, behind those that are stored."""
    return []


def _forget(optimizer: Optimizer) -> None:
    PlainSteps.of(optimizer).forget()


@register_optimizer_step_pre_hook
def _begin(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Run before the step of any optimizer.

    Raises: OptimizerError for one that can't step over stored parameters, before it has changed anything.
    """
    if isinstance(optimizer, Streamed):
        return
    parameters = []
    for group in optimizer.param_groups:
        stored = [p for p in map(stored_parameter, group["params"]) if p is not None]
        for dtype in {p.dtype for p in stored} if isinstance(optimizer, SGD) and group.get("fused") else ():
            if not sgd_updates(dtype):
                raise OptimizerError(
                    f"torch.optim.SGD(fused=True) leaves parameters of {dtype} on the CPU as they are in torch "
                    f"{torch.__version__} (its issue 191763), stored or not: use zinf_fx.optim.SGD"
                )
        parameters += stored
    if parameters:
        PlainSteps.of(optimizer).begin(optimizer, parameters)


@register_optimizer_step_post_hook
def _end(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    PlainSteps.end(optimizer)


@functools.cache
def sgd_updates(dtype: torch.dtype) -> bool:
    """Whether PyTorch's fused SGD on the CPU changes whole vectors of `dtype`: up to torch 2.13, not of 16 bits."""
    parameter, gradient = (torch.full((64,), value, dtype=dtype, device="cpu") for value in (0.0, 1.0))
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 1.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([parameter], [gradient], [], is_first_step=False, **options)
    return torch.equal(parameter, -gradient)


def _like(operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> StoredTensor | NotImplementedType:
    """Run `zeros_like`, `full_like` or `empty_like` of a whole stored tensor, without another dtype, device or
    layout."""
    source, *value = args
    if source.views or any(v is not None for k, v in kwargs.items() if k not in ("memory_format", "pin_memory")):
        return NotImplemented
    result = StoredTensor.of(new_states([source.stored])[0], source.shape, source.device)
    if operation is not aten.empty_like.default:
        fill(result, value[0] if value else 0)
    return result


for _overload in (aten.zeros_like, aten.full_like, aten.empty_like):
    handle(_overload, _like)
