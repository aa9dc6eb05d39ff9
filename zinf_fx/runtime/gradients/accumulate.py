"""Gradients arrive where they live, whole, in parts, or this rank's share, and are added to what is there."""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.plan.sharding import Segment
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.gradients.leaf import accumulated_leaf
from zinf_fx.runtime.gradients.reduction import Reduction, synchronises
from zinf_fx.runtime.tensor.arrival import implement_arrival
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

aten = torch.ops.aten


def reserve_gradient(parameter: StoredTensor) -> None:
    """Reserve space for the first gradient, where space may run out: on disk. Later ones find what it gives back.

    Raises: StoreError when there is none, now and not in the first backward pass.
    """
    storage = parameter.storage
    if parameter.requires_grad and storage.placement.gradients == "nvme":
        storage.gradient.space = storage.for_gradient()


def _new_gradient(parameter: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """Without a value yet, on the tier of gradients."""
    storage = parameter.storage
    space, storage.gradient.space = storage.gradient.space, None
    if space is None or space.dtype != dtype:
        space = storage.for_gradient(dtype)
    return StoredTensor.of(space, parameter.shape, parameter.device)


def reduced(parameter: StoredTensor, gradient: torch.Tensor, name: str) -> torch.Tensor | Reduction:
    """What `accumulate_gradient` is to be given for this rank's `gradient`: started on its way over the ranks, with
    what was accumulated under `no_sync`. Itself where there is nothing to reduce, or not now. `name`: for errors."""
    before = parameter.grad
    waits = isinstance(before, StoredTensor) and before.storage.share.unreduced
    share = parameter.storage.share
    if share.ranks.size == 1 or not (synchronises(share) or (before is not None and not waits)):
        return gradient
    if waits:
        gradient = gradient + before.full_tensor()
        parameter.grad = None
    return Reduction(parameter.storage, gradient, name)


def take_unreduced(parameter: StoredTensor) -> StoredTensor | None:
    """The `grad` of this rank alone, if a backward pass is to reduce it now, tile by tile; it is None then."""
    before = parameter.grad
    unreduced = isinstance(before, StoredTensor) and before.storage.share.unreduced
    if not (unreduced and synchronises(parameter.storage.share)):
        return None
    parameter.grad = None
    return before


def reduced_part(
    parameter: StoredTensor, start: int, gradient: torch.Tensor, name: str, before: StoredTensor | None
) -> torch.Tensor | Reduction:
    """As `reduced`, for the elements from `start` on. `before`: a gradient to which it is to be added."""
    grad = parameter.grad
    stays = isinstance(grad, StoredTensor) and grad.storage.share.unreduced
    share = parameter.storage.share
    if share.ranks.size == 1 or not (synchronises(share) or (grad is not None and not stays)):
        return gradient
    if before is not None:
        window = before.storage.settled().device_window(start, gradient.numel()).read_only()
        try:
            gradient = gradient + window.wait().view(gradient.shape)
        finally:
            window.close()
    return Reduction(parameter.storage, gradient, name, start)


def accumulate_gradient(parameter: StoredTensor, gradient: torch.Tensor | Reduction, offset: int | None = None) -> None:
    """Add `gradient` to the parameter's `grad`, as autograd would, on the tier of gradients. `offset`: where in the
    host arena's region it passes through, on its way to NVMe.

    Of many ranks, an ordinary tensor is this rank's own gradient, to be reduced later.
    """
    if isinstance(gradient, Reduction):
        average = gradient.wait()
        if not gradient.whole:
            _accumulate_share(parameter, gradient.segments, average, offset)
            return
        gradient = average
    elif parameter.storage.share.ranks.size > 1 and parameter.grad is None:
        parameter.grad = _unreduced(parameter, gradient)
        return
    with torch.no_grad():
        if parameter.grad is None:
            stored = _new_gradient(parameter, gradient.dtype)
            stored.storage.set(gradient, offset)
            parameter.grad = stored
        elif isinstance(parameter.grad, StoredTensor):
            accumulate_gradient_part(parameter, 0, gradient, first=False, offset=offset)
        else:
            parameter.grad.add_(gradient)


def _unreduced(parameter: StoredTensor, gradient: torch.Tensor) -> StoredTensor:
    """A new gradient that no other rank knows of yet."""
    storage = parameter.storage.for_gradient(gradient.dtype, partitioned=False)
    storage.share.unreduced = True
    storage.set(gradient)
    return StoredTensor.of(storage, parameter.shape, parameter.device)


def _accumulate_share(
    parameter: StoredTensor, segments: Sequence[Segment], share: torch.Tensor, offset: int | None
) -> None:
    """Add to this rank's share of the parameter's `grad`. `share` has the size of a shard."""
    with torch.no_grad():
        if first := parameter.grad is None:
            parameter.grad = _new_gradient(parameter, share.dtype)
        storage = _storage_of_shares(parameter)
        if first and storage.share.partitioned:
            storage.settled().set(share, offset)
        else:
            _add_share(storage, segments, share, first, offset)


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


def begin_gradient(parameter: StoredTensor, reduced: bool) -> None:
    """Give the parameter a `grad` on the tier of gradients, whose values are undefined; unless it is to be `reduced`,
    of this rank alone."""
    if reduced or parameter.storage.share.ranks.size == 1:
        parameter.grad = _new_gradient(parameter, parameter.dtype)
        return
    storage = parameter.storage.for_gradient(partitioned=False)
    storage.share.unreduced = True
    parameter.grad = StoredTensor.of(storage, parameter.shape, parameter.device)


def accumulate_gradient_part(
    parameter: StoredTensor, start: int, gradient: torch.Tensor | Reduction, *, first: bool, offset: int | None = None
) -> None:
    """Add `gradient` to the elements of the parameter's `grad` from `start` on, or if `first`, write them; `offset` as
    for `accumulate_gradient`."""
    grad = parameter.grad
    with torch.no_grad():
        if isinstance(gradient, Reduction):
            value = gradient.wait()
            if not gradient.whole:
                _add_share(_storage_of_shares(parameter), gradient.segments, value, first, offset)
                return
            gradient = value
        if not isinstance(grad, StoredTensor) or grad.views:
            grad.view(-1)[start : start + gradient.numel()].add_(gradient.reshape(-1))
            return
        _add_elements(grad.storage, start, gradient, first, offset)


def _take(parameter: StoredTensor) -> None:
    """Move a gradient that eager autograd left on the device to the tier of gradients; reduce one of this rank alone,
    to which autograd has added."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        return
    with RUNNING.turn():
        name = f"a parameter of shape {tuple(parameter.shape)}"
        if isinstance(gradient, StoredTensor):
            if (before := take_unreduced(parameter)) is not None:
                accumulate_gradient(parameter, Reduction(parameter.storage, before.full_tensor(), name))
            return
        parameter.grad = parameter.set_aside()
        accumulate_gradient(parameter, reduced(parameter, gradient, name))
        state = parameter.storage.gradient
        if state.consumer is not None and state.backwards_due <= 0:
            state.consumer.take_gradient(parameter)


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
        name = f"a parameter of shape {tuple(parameter.shape)}"
        with RUNNING.turn():
            accumulate_gradient(parameter, reduced(parameter, gradient, name))
        return present
    parameter.put_aside()
    return gradient.clone()


implement_arrival(_take)
handle(aten.add, _add)
handle(aten.add_, _add)
