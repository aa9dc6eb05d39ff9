"""Gradients are added to the `grad` of their parameters, where gradients live: whole, in parts, or this rank's shard.

All of them come to `accumulate`: what a compiled graph computed; what eager autograd left in `grad`, by the gradient
hook; and what eager autograd is about to add to a gradient that was reduced over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import NotImplementedType
from typing import cast

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.interrupts import held_back
from zinf_fx.plan.sharding import Segment
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.gradients.buffers import (
    plain_gradient,
    plain_gradients,
    run_of,
    stored_gradients,
)
from zinf_fx.runtime.gradients.leaf import accumulated_leaf
from zinf_fx.runtime.gradients.reduction import ReducedGradient, Reduction
from zinf_fx.runtime.gradients.state import (
    GradientState,
    check_may_have_graph,
    is_reduced_now,
    local_gradient,
    local_taken,
    state_of,
    stored_gradient,
)
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.pending_gradient import implement_gradient_hook
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

aten = torch.ops.aten

Gradient = torch.Tensor | ReducedGradient
"""What arrives for a parameter. With several ranks, an ordinary tensor is this rank's own, to be reduced later."""


def new_gradient(parameter: StoredTensor, dtype: torch.dtype, *, reduced: bool) -> torch.Tensor:
    """Return a gradient without values yet, on the tier of gradients; of this rank alone, if there are others, and it
    isn't `reduced` over them."""
    if parameter.stored.has_plain_gradient:
        return plain_gradient(parameter, dtype)
    return _new_stored(parameter, dtype, reduced=reduced)


def _new_stored(parameter: StoredTensor, dtype: torch.dtype, *, reduced: bool) -> StoredTensor:
    if not reduced and parameter.stored.shard.ranks.size > 1:
        return local_gradient(parameter, dtype)
    (gradient,) = stored_gradients([parameter], dtype)
    return gradient


def start_reduction(
    parameters: Sequence[StoredTensor | None],
    gradients: Sequence[torch.Tensor],
    name: str,
    before: Sequence[StoredTensor | None],
    start: int = 0,
) -> tuple[list[Gradient], Reduction | None]:
    """Start to reduce this rank's gradients of parameters that move together, or of the elements of a lone one from
    `start` on, as far as they are to be reduced now.

    `parameters` has None in the place of one whose gradient nobody is to get. `before` has gradients, accumulated under
    `no_sync`, to which these are to be added. `name` is for errors. Returns what is to be accumulated, and the
    reduction.
    """
    arriving: list[Gradient] = list(gradients)
    numbered = enumerate(parameters)
    reduced = {n: parameter for n, parameter in numbered if parameter is not None and is_reduced_now(parameter)}
    if not reduced:
        return arriving, None
    sums = [_with(before[number], gradients[number], start) for number in reduced]
    reduction = Reduction([parameter.stored for parameter in reduced.values()], sums, name, start)
    for number, gradient in zip(reduced, reduction.gradients, strict=True):
        arriving[number] = gradient
    return arriving, reduction


def _with(before: StoredTensor | None, gradient: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sum of a gradient, which is of the elements from `start` on, and what was accumulated before it."""
    if before is None:
        return gradient
    window = before.stored.settled().device_window(start, gradient.numel()).read_only()
    try:
        return gradient + window.wait().view(gradient.shape)
    finally:
        window.close()


@torch.no_grad()
def accumulate(
    parameters: Sequence[StoredTensor],
    gradients: Sequence[Gradient],
    offsets: Sequence[int | None] | None = None,
    *,
    start: int | None = None,
    first: bool = False,
) -> None:
    """Add gradients to the `grad` of their parameters, as autograd would, on the tier of gradients: in one transfer
    where they live side by side.

    `offsets` says where in the host arena's region each passes through on its way to NVMe. Of a lone parameter that has
    a `grad`, the gradient may be a part, which begins with the element `start`; `first` says whether that part has no
    values yet.
    """
    if start is None and parameters[0].stored.has_plain_gradient:
        values = cast(Sequence[torch.Tensor], gradients)  # one rank reduces nothing
        with _noted(parameters[0].stored, values):
            _accumulate_plain(parameters, values)
        return
    if offsets is None:
        offsets = [None] * len(parameters)
    if len(parameters) > 1 and _accumulate_run(parameters, gradients, offsets[0]):
        return
    for parameter, gradient, offset in zip(parameters, gradients, offsets, strict=True):
        _accumulate_alone(parameter, gradient, offset, start or 0, first)


def _accumulate_run(parameters: Sequence[StoredTensor], gradients: Sequence[Gradient], offset: int | None) -> bool:
    """Accumulate gradients in one transfer. Returns whether that can be: those that are there, or are to be made, live
    side by side, and this rank gets all that it has of them."""
    storage = parameters[0].stored
    if storage.shard.ranks.size > 1:
        reduced = [gradient for gradient in gradients if isinstance(gradient, ReducedGradient)]
        if len(reduced) < len(gradients) or not (reduced[0].whole or storage.placement.stage >= 2):
            return False
    keys = [parameter.stored.key for parameter in parameters]
    order = sorted(range(len(parameters)), key=keys.__getitem__)
    parameters = [parameters[number] for number in order]
    arrived = [gradients[number] for number in order]
    values = [value.wait() if isinstance(value, ReducedGradient) else value for value in arrived]
    new = not [parameter for parameter in parameters if parameter.grad is not None]
    if new:
        present = stored_gradients(parameters, values[0].dtype)
    else:
        present = [gradient for parameter in parameters if (gradient := stored_gradient(parameter)) is not None]
        if len(present) < len(parameters):
            return False
    run = run_of(present)
    if run is None:
        return False
    for gradient in present if not new else ():
        gradient.stored.settled()
    window = run.bytes.device_window(load=not new, offset=offset)
    try:
        parts = run.cut.of(window.wait(), storage.tiers.host)
        with run.bytes.noted(run.nbytes):
            torch._foreach_copy_(parts, values) if new else torch._foreach_add_(parts, values)
    except BaseException:
        window.close()
        raise
    window.store()
    if new:
        for parameter, gradient in zip(parameters, present, strict=True):
            parameter.grad = gradient
    return True


def _accumulate_alone(parameter: StoredTensor, gradient: Gradient, offset: int | None, start: int, first: bool) -> None:
    """Accumulate one gradient, or a part of one from `start` on."""
    present, value = parameter.grad, _value(gradient)
    is_reduced = isinstance(gradient, ReducedGradient)
    segments = gradient.segments if is_reduced else ()
    if present is None:
        new = _new_stored(parameter, value.dtype, reduced=is_reduced)
        if segments and not new.stored.shard.partitioned:
            _add_shard(new.stored, segments, value, True, offset)
        elif segments:
            new.stored.settled().set(value, offset)
        else:
            new.stored.set(value, None if state_of(new) is GradientState.LOCAL else offset)
        parameter.grad = new
    elif segments:
        _add_shard(_storage_of_gradient(parameter), segments, value, first, offset)
    elif (stored := stored_gradient(parameter)) is not None:
        _add_elements(stored.stored, start, value, first, offset)
    else:
        part = present if present.shape == value.shape else present.view(-1)[start : start + value.numel()]
        with _noted(parameter.stored, [value]):
            value = value.reshape(part.shape)
            part.copy_(value) if first else part.add_(value)


def _accumulate_plain(parameters: Sequence[StoredTensor], gradients: Sequence[torch.Tensor]) -> None:
    """Accumulate gradients that are ordinary tensors of one tier: see [Note: plain gradients].

    New ones share one buffer of the host's memory, which ends with the last of them. Raises: StoreError when the host
    arena has no room.
    """
    storage = parameters[0].stored
    on_device = storage.placement.gradients == "device"
    new_of: list[StoredTensor] = []
    arriving: list[torch.Tensor] = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if (present := parameter.grad) is not None:
            present.add_(gradient)
        elif on_device:
            parameter.grad = plain_gradient(parameter, gradient.dtype).copy_(gradient)
        else:
            new_of.append(parameter)
            arriving.append(gradient)
    if arriving:
        copies = plain_gradients(storage.tiers, [(gradient.shape, gradient.dtype) for gradient in arriving])
        torch._foreach_copy_(copies, arriving)
        for parameter, copy in zip(new_of, copies, strict=True):
            parameter.grad = copy


def _value(gradient: Gradient) -> torch.Tensor:
    return gradient.wait() if isinstance(gradient, ReducedGradient) else gradient


def _noted(storage: TensorStorage, gradients: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Open a block in which gradients are copied, or added, to where they live."""
    if RECORDER.log is None or storage.placement.gradients == "device":
        return nullcontext()
    return RECORDER.work("offload", sum(gradient.nbytes for gradient in gradients), CPU.torch_device)


def _storage_of_gradient(parameter: StoredTensor) -> TensorStorage:
    """Return the storage of the parameter's `grad`. Raises: StoredTensorError for one that only has whole values."""
    gradient = stored_gradient(parameter)
    if gradient is None:
        raise StoredTensorError(
            f"the `grad` of a stored parameter of shape {tuple(parameter.shape)} was set to a tensor that this "
            "rank's shard of a gradient can't be added to: set it to None, or change it with zinf_fx.gathered()"
        )
    return gradient.stored


def _add_shard(
    storage: TensorStorage, segments: Sequence[Segment], parts: torch.Tensor, first: bool, offset: int | None
) -> None:
    """Add this rank's `parts` of some segments in a row or, if `first`, write them."""
    rank = storage.shard.ranks.shard
    if storage.shard.partitioned:
        _add_elements(storage, segments[0].held_by(rank).start, parts, first, offset)
        return
    for segment in segments:
        own, begin = segment.of_rank(rank), segment.held_by(rank).start - segments[0].held_by(rank).start
        _add_elements(storage, own.start, parts[begin : begin + len(own)], first, offset)
        offset = None  # is the place of one
    storage.shard.stale = True


def _add_elements(storage: TensorStorage, start: int, values: torch.Tensor, first: bool, offset: int | None) -> None:
    """Add `values` to the elements held from `start` on or, if `first`, write them."""
    window = storage.settled().device_window(start, values.numel(), load=not first, offset=offset)
    try:
        elements = window.wait().view(values.shape)
        with storage.bytes.noted(values.nbytes):
            elements.copy_(values) if first else elements.add_(values)
    except BaseException:
        window.close()
        raise
    window.store()


@dataclass(frozen=True)
class Addends:
    """Where elements of gradients live that others are to be added to."""

    stored: StoredBytes
    start: int
    count: int


def addends_of(parameters: Sequence[StoredTensor], start: int, count: int) -> Addends | None:
    """Return what `accumulate` will add the gradients of these parameters to in one transfer, or of a lone one `count`
    elements from `start` on; None if nothing is there, or it can't be said yet."""
    in_order = sorted(parameters, key=lambda parameter: parameter.stored.key)
    gradients = [gradient for parameter in in_order if (gradient := stored_gradient(parameter)) is not None]
    if len(gradients) < len(parameters):
        return None
    if len(gradients) > 1:
        run = run_of(gradients)
        return None if run is None else Addends(run.bytes, 0, run.bytes.count)
    storage, shard = gradients[0].stored, parameters[0].stored.shard
    if shard.ranks.shards == 1 or state_of(gradients[0]) is GradientState.LOCAL:
        return Addends(storage.bytes, start, count)
    if not storage.shard.partitioned:
        return None
    held = [segment.held_by(shard.ranks.shard) for segment in shard.shards.within(start, count)]
    return Addends(storage.bytes, held[0].start, sum(map(len, held)))


def add_gradient(parameter: StoredTensor, gradient: torch.Tensor) -> None:
    """Add this rank's gradient, which eager autograd made, to the parameter's `grad`, reduced over the ranks where it
    is to be now."""
    name = f"a parameter of shape {tuple(parameter.shape)}"
    with local_taken(parameter) as before:
        if is_reduced_now(parameter):  # ranks may have called other parts of the model
            parameter.stored.shard.ranks.meet(f"the reduction of the gradient of {parameter.stored.name}")
        arriving, _ = start_reduction([parameter], [gradient], name, [before])
        accumulate([parameter], arriving)


def _arrived(parameter: torch.Tensor) -> None:
    """Move what eager autograd left in the parameter's `grad` to the tier of gradients, unless it is there. This is a
    hook."""
    assert isinstance(parameter, StoredTensor), "nothing else has this hook"
    storage = parameter.stored
    state = state_of(parameter.grad, storage)
    if state is GradientState.STORED or (state is GradientState.PLAIN and not storage.gradient.followed):
        return
    if state is GradientState.RECORDED:
        check_may_have_graph(parameter)
    elif state in (GradientState.PLAIN, GradientState.ORDINARY, GradientState.LOCAL):
        _settle(parameter, state)


@held_back
def _settle(parameter: StoredTensor, state: GradientState) -> None:
    """Move an ordinary gradient to its tier, and tell who consumes it; reduce a local one, to which autograd added."""
    gradient, storage = parameter.grad, parameter.stored
    if gradient is None or gradient.layout != torch.strided:
        return
    with RUNNING.turn():
        if state is GradientState.LOCAL:
            with local_taken(parameter) as before:
                if before is not None:
                    add_gradient(parameter, before.full_tensor())
            return
        if not storage.has_plain_gradient:
            parameter.grad = storage.gradient.take_replaced()
            add_gradient(parameter, gradient)
        elif state is GradientState.ORDINARY:
            with torch.no_grad(), _noted(storage, [gradient]):
                parameter.grad = plain_gradient(parameter, gradient.dtype).copy_(gradient)
        pending = storage.gradient
        if pending.consumer is not None and pending.backwards_due <= 0:
            pending.consumer.take_gradients([parameter])


def _add(operation: torch._ops.OpOverload, args: tuple, kwargs: dict) -> torch.Tensor | NotImplementedType:
    """Reduce what eager autograd adds to a gradient that was reduced over the ranks: it is this rank's alone.

    With `create_graph`, autograd replaces the gradient by the sum that it asks for: it is given this rank's alone.
    """
    present, gradient = args[:2]
    leaf = accumulated_leaf() if isinstance(present, StoredTensor) else None
    if leaf is None or present.stored.shard.ranks.size == 1 or state_of(present) is not GradientState.STORED:
        return NotImplemented
    parameter = stored_parameter(leaf)
    if parameter is None or not isinstance(parameter.grad, StoredTensor) or parameter.grad.stored is not present.stored:
        return NotImplemented
    if operation._schema.is_mutable:
        with RUNNING.turn():
            add_gradient(parameter, gradient)
        return present
    parameter.stored.gradient.replaced = parameter.grad
    return gradient.clone()


implement_gradient_hook(_arrived)
handle(aten.add, _add)
handle(aten.add_, _add)
