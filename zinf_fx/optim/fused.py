"""Plain torch.optim classes with `fused=True` over stored parameters: their one operation, chunk by chunk.

The arithmetic is PyTorch's, in the dtype of the parameters: states of bf16 parameters are bf16 too, and there is no
master copy. The classes of `zinf_fx.optim` have one.

The torch class makes its states by `zeros_like`, `full_like` or `empty_like` of its parameters and gradients. Without
further arguments these give a stored tensor on the tier of optimizer states, for any whole stored tensor. States that
came otherwise, from `load_state_dict` or from before the model was offloaded, move there when the next step begins.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Collection
from types import NotImplementedType
from typing import Any, ClassVar

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zinf_fx.errors import OptimizerError
from zinf_fx.optim.elements import copy_into, fill, moved
from zinf_fx.optim.plain import PlainSteps, runs_in_place
from zinf_fx.optim.rows import Row, update_in_chunks
from zinf_fx.optim.states import check_reduced, place_of, working_dtype
from zinf_fx.optim.streamed import Streamed
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.execute.executor import EXECUTOR, Stage
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.recorder import RECORDER, STATES
from zinf_fx.runtime.tensor.local_parameter import local_part, stored_parameter
from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

aten = torch.ops.aten

# The classes whose whole step is one of the operations in `_OPERATIONS`.
_FUSED_CLASSES = (Adam, AdamW, SGD, Adagrad)
_OPERATIONS = (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)


def _run(operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """A fused operation over lists with stored tensors among them."""
    found_inf = kwargs.get("found_inf")
    if found_inf is not None and found_inf.item():  # the kernels change nothing then: spare the transfers
        return
    arguments = operation._schema.arguments[: len(args)]
    lists = {argument.name: values for argument, values in zip(arguments, args, strict=True)}
    rows = [
        Row({name: values[index] for name, values in lists.items() if values}) for index in range(len(lists["self"]))
    ]
    ordinary = [row for row in rows if not row.stored]
    if ordinary:
        operation(*([r.operands[name] for r in ordinary] if lists[name] else [] for name in lists), **kwargs)
    stored = [row for row in rows if row.stored]
    written = {argument.name for argument in arguments if argument.alias_info is not None}
    if kwargs.get("grad_scale") is None:
        written.remove("grads")  # they change only by being unscaled
    unread = {"momentum_buffer_list"} if kwargs.get("is_first_step") else set()
    for row in stored:
        _check(row, written)

    places = {place_of(tensor) for row in stored for tensor in row.stored}
    place = places.pop() if len(places) == 1 else CPU
    options = {name: moved(value, place) for name, value in kwargs.items()}

    def update(pieces: dict[str, list[torch.Tensor]]) -> None:
        if _STEPPING.step is not None:
            _STEPPING.step.torn = True
        states = [one for name in written - {"self", "grads"} for one in pieces.get(name, [])]
        with RECORDER.work("update", sum(one.nbytes for one in states), place.torch_device):
            operation(*(pieces.get(name, []) for name in lists), **options)

    with RUNNING.turn():
        EXECUTOR.drop_anticipated()
        try:
            with RECORDER.about("", STATES):
                update_in_chunks(stored, place, update, written, unread)
        except BaseException:
            EXECUTOR.reset()
            raise
    for row in stored:  # let autograd notice, as after any in-place update
        torch.autograd.graph.increment_version(row.operands["self"])


def _check(row: Row, written: Collection[str]) -> None:
    """Raises: OptimizerError for a parameter or another operand that can't be updated in pieces."""
    for name, operand in row.operands.items():
        if isinstance(operand, StoredTensor):
            working_dtype(operand)
        elif name in written and not operand.is_contiguous():
            raise OptimizerError(
                f"an ordinary tensor of shape {tuple(operand.shape)} in {name} is not contiguous, so that it can't be "
                "updated in pieces beside a stored parameter: make it contiguous"
            )


def _like(operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> StoredTensor | NotImplementedType:
    """`zeros_like`, `full_like` or `empty_like` of a whole stored tensor, without another dtype, device or layout."""
    source, *value = args
    if source.views or any(v is not None for k, v in kwargs.items() if k not in ("memory_format", "pin_memory")):
        return NotImplemented
    result = _state(source)
    if operation is not aten.empty_like.default:
        fill(result, value[0] if value else 0)
    return result


def _state(parameter: StoredTensor) -> StoredTensor:
    """A new tensor of the shape and dtype of `parameter`, without a value yet, where optimizer states live."""
    storage = parameter.storage.for_state()
    return StoredTensor.of(storage, parameter.shape, parameter.device)


for _operation in _OPERATIONS:
    handle(_operation, _run)
for _overload in (aten.zeros_like, aten.full_like, aten.empty_like):
    handle(_overload, _like)


# -- whole steps of plain optimizers -----------------------------------------------------------------------------------


class _PlainStep(Stage):
    """What is known of the steps of one plain optimizer.

    Attributes:
        torn: its parameters are being changed, or were when its last step was interrupted.
    """

    of: ClassVar[weakref.WeakKeyDictionary[Optimizer, _PlainStep]] = weakref.WeakKeyDictionary()
    torn = False


class _Stepping(threading.local):
    """Whose step is under way in this thread."""

    step: _PlainStep | None = None


_STEPPING = _Stepping()


@register_optimizer_step_pre_hook
def _begin(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Before the step of any optimizer.

    Raises: OptimizerError for one that can't step over stored parameters, before it has changed anything.
    """
    _STEPPING.step = None
    if isinstance(optimizer, Streamed):
        return
    parameters, fused = [], True
    for group in optimizer.param_groups:
        stored = [p for p in map(stored_parameter, group["params"]) if p is not None]
        fused &= isinstance(optimizer, _FUSED_CLASSES) and bool(group.get("fused") or not stored)
        for dtype in {p.dtype for p in stored} if isinstance(optimizer, SGD) and group.get("fused") else ():
            if not sgd_updates(dtype):
                raise OptimizerError(
                    f"torch.optim.SGD(fused=True) leaves parameters of {dtype} on the CPU as they are in torch "
                    f"{torch.__version__} (its issue 191763), stored or not: use zinf_fx.optim.SGD"
                )
        parameters += stored
    if not parameters:
        return
    if not fused and runs_in_place(parameters):
        for parameter in parameters:
            check_reduced(parameter)
        return
    if not fused:
        PlainSteps.of(optimizer).begin(optimizer)
        return
    step = _PlainStep.of.get(optimizer)
    if step is None:
        step = _PlainStep.of[optimizer] = _PlainStep()
        optimizer.register_load_state_dict_post_hook(_forget)
    if step.torn:
        raise OptimizerError(
            "a step of this optimizer was interrupted, and some parameters may be updated and others not; load the "
            "model's parameters and the optimizer's state_dict from a checkpoint before going on"
        )
    for parameter in parameters:
        check_reduced(parameter)
        _move_states(parameter, optimizer.state.get(parameter.whole, {}))
    _STEPPING.step = step
    with RUNNING.turn():
        EXECUTOR.begin(step)


@register_optimizer_step_post_hook
def _end(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    _STEPPING.step = None
    PlainSteps.end(optimizer)
    step = _PlainStep.of.get(optimizer)
    if step is not None:
        step.torn = False
        with RUNNING.turn():
            EXECUTOR.end(step)


def _forget(optimizer: Optimizer) -> None:
    _PlainStep.of[optimizer].torn = False


def _move_states(parameter: StoredTensor, states: dict[str, Any]) -> None:
    """States in memory that have the parameter's shape move to their tier."""
    for name, value in states.items():
        value = local_part(value)
        in_memory = isinstance(value, torch.Tensor) and not isinstance(value, StoredTensor)
        if in_memory and name != "step" and value.shape == parameter.shape:
            stored = _state(parameter)
            copy_into(stored, value)
            states[name] = parameter.shown(stored)


@functools.cache
def sgd_updates(dtype: torch.dtype) -> bool:
    """Whether PyTorch's fused SGD on the CPU changes whole vectors of `dtype`: up to torch 2.13, not of 16 bits."""
    parameter, gradient = torch.zeros(64, dtype=dtype), torch.ones(64, dtype=dtype)
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 1.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([parameter], [gradient], [], is_first_step=False, **options)
    return torch.equal(parameter, -gradient)
