"""Gradients arrive where they live, whole, in parts, or this rank's share, and are added to what is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import NotImplementedType
from typing import NamedTuple

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.plan.sharding import Segment
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.gradients.leaf import accumulated_leaf
from zinf_fx.runtime.gradients.plain import (
    in_its_memory,
    is_there,
    new_plain_gradient,
    noted,
    plain_copy,
)
from zinf_fx.runtime.gradients.reduction import PackReduction, Reduced, ReducedMember, Reduction, synchronises
from zinf_fx.runtime.gradients.spaces import beside_again, beside_of, free_space, lent_gradient, new_spaces
from zinf_fx.runtime.tensor.arrival import implement_arrival
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.stored_tile import StoredTile

aten = torch.ops.aten


def new_gradient(parameter: StoredTensor, dtype: torch.dtype, *, reduced: bool) -> torch.Tensor:
    """A gradient without values yet, on the tier of gradients; of this rank alone, if there are others, and it isn't
    `reduced` over them."""
    storage = parameter.storage
    if storage.has_plain_gradient:
        return new_plain_gradient(parameter, storage, dtype)
    return _new_stored(parameter, dtype, reduced=reduced)


def _new_stored(parameter: StoredTensor, dtype: torch.dtype, *, reduced: bool) -> StoredTensor:
    storage = parameter.storage
    if storage.share.ranks.size == 1 and storage.placement.gradients == "host":
        return lent_gradient(parameter, dtype)
    if reduced or storage.share.ranks.size == 1:
        space = free_space(storage, dtype) or storage.for_gradient(dtype)
    else:
        space = storage.for_gradient(dtype, partitioned=False)
        space.share.unreduced = True
    return StoredTensor.of(space, parameter.shape, parameter.device)


def _unreduced(parameter: StoredTensor) -> StoredTensor | None:
    """The parameter's `grad`, if it is of this rank alone."""
    grad = parameter.grad
    return grad if isinstance(grad, StoredTensor) and grad.storage.share.unreduced else None


def take_unreduced(parameter: StoredTensor) -> StoredTensor | None:
    """The `grad` of this rank alone, if a backward pass is to reduce it now; it is None then."""
    before = _unreduced(parameter)
    if before is None or not synchronises(parameter.storage.share):
        return None
    parameter.grad = None
    return before


@contextmanager
def _unreduced_taken(parameter: StoredTensor) -> Iterator[StoredTensor | None]:
    """A block that reduces what `take_unreduced` gives it. After an error, that is the parameter's `grad` again."""
    before = take_unreduced(parameter)
    try:
        yield before
    except BaseException:
        give_back_unreduced(parameter, before)
        raise


def give_back_unreduced(parameter: StoredTensor, before: StoredTensor | None) -> None:
    """Undo `take_unreduced`, unless another gradient has taken its place."""
    if parameter.grad is None:
        parameter.grad = before


def reduction_of(
    parameter: StoredTensor, start: int, gradient: torch.Tensor, name: str, before: StoredTensor | None
) -> torch.Tensor | Reduction:
    """What is to be accumulated for this rank's `gradient` of the elements from `start` on: that, started on its way
    over the ranks, or itself where there is nothing to reduce, or not now. `name`: for errors. `before`: a gradient,
    accumulated under `no_sync`, to which it is to be added."""
    if not is_reduced_now(parameter):
        return gradient
    return Reduction(parameter.storage, _with(before, gradient, start), name, start)


def reduction_of_pack(
    parameters: Sequence[StoredTensor | None],
    gradients: Sequence[torch.Tensor],
    name: str,
    before: Sequence[StoredTensor | None],
) -> tuple[list[torch.Tensor | ReducedMember], PackReduction | None]:
    """As `reduction_of`, for the parameters of a pack, in one collective; and that, if there is something to reduce.
    None in the place of a parameter: nobody is to get its gradient."""
    found: list[torch.Tensor | ReducedMember] = list(gradients)
    now = [number for number, one in enumerate(parameters) if one is not None and is_reduced_now(one)]
    if not now:
        return found, None
    sums = [_with(before[number], gradients[number], 0) for number in now]
    reduction = PackReduction([parameters[number].storage for number in now], sums, name)
    for number, member in zip(now, reduction.members, strict=True):
        found[number] = member
    return found, reduction


def is_reduced_now(parameter: StoredTensor) -> bool:
    """Whether a gradient that arrives now is reduced over the ranks at once."""
    share = parameter.storage.share
    adds_to_reduced = parameter.grad is not None and _unreduced(parameter) is None
    return share.ranks.size > 1 and (synchronises(share) or adds_to_reduced)


def _with(before: StoredTensor | None, gradient: torch.Tensor, start: int) -> torch.Tensor:
    """The sum of a gradient, which is of the elements from `start` on, and what was accumulated before it."""
    if before is None:
        return gradient
    window = before.storage.settled().device_window(start, gradient.numel()).read_only()
    try:
        return gradient + window.wait().view(gradient.shape)
    finally:
        window.close()


@torch.no_grad()
def accumulate_gradient(parameter: StoredTensor, gradient: torch.Tensor | Reduced, offset: int | None = None) -> None:
    """Add `gradient` to the parameter's `grad`, as autograd would, on the tier of gradients. `offset`: where in the
    host arena's region it passes through, on its way to NVMe.

    Of many ranks, an ordinary tensor is this rank's own gradient, to be reduced later.
    """
    if parameter.grad is not None:
        accumulate_gradient_part(parameter, 0, gradient, first=False, offset=offset)
        return
    if parameter.storage.has_plain_gradient:
        with noted(parameter.storage, gradient.nbytes):
            parameter.grad = plain_copy(parameter, parameter.storage, gradient)
        return
    reduced = isinstance(gradient, Reduced)
    value = gradient.wait() if reduced else gradient
    stored = _new_stored(parameter, value.dtype, reduced=reduced)
    storage = stored.storage
    if not reduced or gradient.whole:
        storage.set(value, None if storage.share.unreduced else offset)
    elif storage.share.partitioned:
        storage.settled().set(value, offset)
    else:
        _add_share(storage, gradient.segments, value, True, offset)
    parameter.grad = stored


@torch.no_grad()
def accumulate_side_by_side(
    pack: StoredTile,
    parameters: Sequence[StoredTensor],
    gradients: Sequence[torch.Tensor | ReducedMember],
    offset: int | None,
) -> bool:
    """As `accumulate_gradient`, for all parameters of a pack, in one transfer. Returns whether that can be: the
    gradients that are there, or that are to be made, live side by side, and this rank gets all that it has of them."""
    if pack.ranks.size > 1:
        if not _are_all_held(parameters[0].storage, gradients):
            return False
        gradients = [one.wait() for one in gradients]
    grads = [parameter.grad for parameter in parameters]
    new = all(grad is None for grad in grads)
    if new:
        spaces = new_spaces(pack, gradients[0].dtype)
    else:
        stored = all(isinstance(grad, StoredTensor) and not grad.views for grad in grads)
        spaces = [grad.storage for grad in grads] if stored else [None]
    if None in spaces:
        return False
    if not new:
        for space in spaces:
            space.settled()
    beside = beside_of(pack, spaces, gradients)
    if beside is None:
        return False
    window = beside.together.device_window(load=not new, offset=offset)
    try:
        parts = beside.cut.of(window.wait(), pack.tiers.host)
        inorder = [gradients[number] for number in pack.order]
        with beside.together.noted(beside.nbytes):
            torch._foreach_copy_(parts, inorder) if new else torch._foreach_add_(parts, inorder)
    except BaseException:
        window.close()
        raise
    window.store()
    if new:
        lease = None if beside.lent is None else beside.lent.lend()
        for parameter, space in zip(parameters, spaces, strict=True):
            parameter.grad = StoredTensor.of(space, parameter.shape, parameter.device)
        del lease  # which the gradients hold, and what is made of them
    return True


def _are_all_held(storage: TensorStorage, gradients: Sequence[torch.Tensor | ReducedMember]) -> bool:
    """Of many ranks, whether gradients that leave are reduced, and all that this rank has of them. `storage`: of one of
    the parameters."""
    reduced = all(isinstance(gradient, ReducedMember) for gradient in gradients)
    return reduced and (gradients[0].whole or storage.placement.stage >= 2)


def add_gradient(parameter: StoredTensor, gradient: torch.Tensor) -> None:
    """Add this rank's gradient, which eager autograd made, to the parameter's `grad`, reduced over the ranks where it
    is to be now."""
    name = f"a parameter of shape {tuple(parameter.shape)}"
    with _unreduced_taken(parameter) as before:
        if is_reduced_now(parameter):  # ranks may have called other parts of the model
            parameter.storage.share.ranks.meet(f"the reduction of the gradient of {parameter.storage.name}")
        accumulate_gradient(parameter, reduction_of(parameter, 0, gradient, name, before))


def _storage_of_shares(parameter: StoredTensor) -> TensorStorage:
    """Of the parameter's `grad`. Raises: StoredTensorError for one that only has whole values."""
    if not isinstance(parameter.grad, StoredTensor) or parameter.grad.views:
        raise StoredTensorError(
            f"the `grad` of a stored parameter of shape {tuple(parameter.shape)} was set to a tensor that this "
            "rank's share of a gradient can't be added to: set it to None, or change it with zinf_fx.gathered()"
        )
    return parameter.grad.storage


def _add_share(
    storage: TensorStorage, segments: Sequence[Segment], share: torch.Tensor, first: bool, offset: int | None
) -> None:
    """Add `share`, this rank's parts of some segments in a row, or if `first`, write it."""
    rank = storage.share.ranks.shard
    if storage.share.partitioned:
        _add_elements(storage, segments[0].held_by(rank).start, share, first, offset)
        return
    for one in segments:
        own, begin = one.of_rank(rank), one.held_by(rank).start - segments[0].held_by(rank).start
        _add_elements(storage, own.start, share[begin : begin + len(own)], first, offset)
        offset = None  # is the place of one
    storage.share.stale = True


def _add_elements(storage: TensorStorage, start: int, values: torch.Tensor, first: bool, offset: int | None) -> None:
    """Add `values` to the elements held from `start` on, or if `first`, write them."""
    window = storage.settled().device_window(start, values.numel(), load=not first, offset=offset)
    try:
        elements = window.wait().view(values.shape)
        with storage.bytes.noted(values.nbytes):
            elements.copy_(values) if first else elements.add_(values)
    except BaseException:
        window.close()
        raise
    window.store()


@torch.no_grad()
def accumulate_gradient_part(
    parameter: StoredTensor, start: int, gradient: torch.Tensor | Reduced, *, first: bool, offset: int | None = None
) -> None:
    """Add `gradient` to the elements of the parameter's `grad` from `start` on, or if `first`, write them; `offset` as
    for `accumulate_gradient`."""
    grad = parameter.grad
    if isinstance(gradient, Reduced):
        value = gradient.wait()
        if not gradient.whole:
            _add_share(_storage_of_shares(parameter), gradient.segments, value, first, offset)
            return
        gradient = value
    if isinstance(grad, StoredTensor) and not grad.views:
        _add_elements(grad.storage, start, gradient, first, offset)
    else:
        part = grad if grad.shape == gradient.shape else grad.view(-1)[start : start + gradient.numel()]
        with noted(parameter.storage, gradient.nbytes):
            value = gradient.reshape(part.shape)
            part.copy_(value) if first else part.add_(value)


class Addends(NamedTuple):
    """Where elements of a gradient live that another one is to be added to."""

    stored: StoredBytes
    start: int
    count: int


def addends_of(parameter: StoredTensor, start: int, count: int) -> Addends | None:
    """What `accumulate_gradient_part` will add a gradient of so many of the parameter's elements to, in one transfer;
    None: none is there, or it can't be said yet."""
    grad, share = parameter.grad, parameter.storage.share
    if not isinstance(grad, StoredTensor) or grad.views:
        return None
    if share.ranks.shards == 1 or grad.storage.share.unreduced:
        return Addends(grad.storage.bytes, start, count)
    if not grad.storage.share.partitioned:
        return None
    held = [segment.held_by(share.ranks.shard) for segment in share.shards.within(start, count)]
    return Addends(grad.storage.bytes, held[0].start, sum(map(len, held)))


def addends_of_pack(pack: StoredTile, parameters: Sequence[StoredTensor]) -> Addends | None:
    """As `addends_of`, of all parameters of a pack, whose gradients lie side by side."""
    grads = [parameter.grad for parameter in parameters]
    if not all(isinstance(grad, StoredTensor) and not grad.views for grad in grads):
        return None
    beside = beside_again(pack, [grad.storage for grad in grads])
    return None if beside is None else Addends(beside.together, 0, beside.together.count)


def _take(parameter: StoredTensor) -> None:
    """Move a gradient that eager autograd left on the device to the tier of gradients, unless it is there; reduce one
    of this rank alone, to which autograd has added."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        return
    if isinstance(gradient, StoredTensor) and not gradient.storage.share.unreduced:
        return
    with RUNNING.turn():
        if isinstance(gradient, StoredTensor):
            with _unreduced_taken(parameter) as before:
                if before is not None:
                    add_gradient(parameter, before.full_tensor())
            return
        if not parameter.storage.has_plain_gradient:
            parameter.grad = parameter.set_aside()
            add_gradient(parameter, gradient)
        elif not in_its_memory(parameter.storage, gradient):
            with torch.no_grad(), noted(parameter.storage, gradient.nbytes):
                parameter.grad = plain_copy(parameter, parameter.storage, gradient)
        state = parameter.storage.gradient
        if state.consumer is not None and state.backwards_due <= 0:
            state.consumer.take_gradients([parameter])


def _add(operation: torch._ops.OpOverload, args: tuple, kwargs: dict) -> torch.Tensor | NotImplementedType:
    """What eager autograd adds to a gradient that was reduced over the ranks is this rank's alone, to be reduced too.

    With `create_graph`, autograd replaces the gradient by the sum that it asks for: it is given this rank's alone.
    """
    present, gradient = args[:2]
    leaf = accumulated_leaf() if isinstance(present, StoredTensor) else None
    if leaf is None or present.storage.share.ranks.size == 1 or present.storage.share.unreduced:
        return NotImplemented
    parameter = stored_parameter(leaf)
    if not isinstance(parameter.grad, StoredTensor) or parameter.grad.storage is not present.storage:
        return NotImplemented
    if operation._schema.is_mutable:
        with RUNNING.turn():
            add_gradient(parameter, gradient)
        return present
    parameter.put_aside()
    return gradient.clone()


implement_arrival(_take, is_there)
handle(aten.add, _add)
handle(aten.add_, _add)
