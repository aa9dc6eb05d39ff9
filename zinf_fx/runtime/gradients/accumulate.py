"""Gradients arrive where they live, whole, in parts, or this rank's share, and are added to what is there."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from operator import itemgetter
from types import NotImplementedType

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.plan.packs import starts_of
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
from zinf_fx.runtime.memory.cut import Cut
from zinf_fx.runtime.tensor.arrival import implement_arrival
from zinf_fx.runtime.tensor.gradient_state import GradientState
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.pack import Pack
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes, side_by_side
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

aten = torch.ops.aten


_nobodys: GradientState[object] = GradientState(space=object())
# References to a space that only a `GradientState` has, as `sys.getrefcount` counts them in this Python.
_UNUSED = sys.getrefcount(_nobodys.space)


def reserve_gradients(parameters: Sequence[StoredTensor]) -> None:
    """Reserve space for the gradients of parameters that live side by side, or of one, where space may run out: on
    disk. It is used again and again.

    Raises: StoreError when there is none, now and not in the first backward pass.
    """
    storages = [parameter.storage for parameter in parameters]
    first = parameters[0]
    if not first.requires_grad or first.grad is not None or storages[0].placement.gradients != "nvme":
        return
    spaces = TensorStorage.gradients_side_by_side(storages) if len(storages) > 1 else [storages[0].for_gradient()]
    for storage, space in zip(storages, spaces, strict=True):
        storage.gradient.space = space


def _free_space(storage: TensorStorage, dtype: torch.dtype) -> TensorStorage | None:
    """What is reserved for the gradient, if nobody has it and it is of this dtype."""
    unused = sys.getrefcount(storage.gradient.space) <= _UNUSED
    return storage.gradient.space if unused and storage.gradient.space.dtype == dtype else None


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
        return _lent_gradient(parameter, dtype)
    if reduced or storage.share.ranks.size == 1:
        space = _free_space(storage, dtype) or storage.for_gradient(dtype)
    else:
        space = storage.for_gradient(dtype, partitioned=False)
        space.share.unreduced = True
    return StoredTensor.of(space, parameter.shape, parameter.device)


def _lent_gradient(parameter: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """As `_new_stored`, where the last gradient was, if that is free."""
    storage = parameter.storage
    lent = _LENT.get(storage)
    if lent is None or not lent.is_free_again(dtype):
        lent = _LENT[storage] = _Lent([storage.for_gradient(dtype)])
    lease = lent.lend()
    gradient = StoredTensor.of(lent.spaces[0], parameter.shape, parameter.device)
    del lease  # which the gradient holds, and what is made of it
    return gradient


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


def reduction_of(parameter: StoredTensor, gradient: torch.Tensor, name: str) -> torch.Tensor | Reduction:
    """What `accumulate_gradient` is to be given for this rank's `gradient`: started on its way over the ranks, with
    what was accumulated under `no_sync`. Itself where there is nothing to reduce, or not now. `name`: for errors."""
    return reduction_of_part(parameter, 0, gradient, name, take_unreduced(parameter))


def reduction_of_part(
    parameter: StoredTensor, start: int, gradient: torch.Tensor, name: str, before: StoredTensor | None
) -> torch.Tensor | Reduction:
    """As `reduction_of`, for the elements from `start` on. `before`: a gradient to which it is to be added."""
    if not _is_reduced_now(parameter):
        return gradient
    return Reduction(parameter.storage, _with(before, gradient, start), name, start)


def reduction_of_pack(
    parameters: Sequence[StoredTensor | None], gradients: Sequence[torch.Tensor], name: str
) -> tuple[list[torch.Tensor | ReducedMember], PackReduction | None]:
    """As `reduction_of`, for the parameters of a pack, in one collective; and that, if there is something to reduce.
    None in the place of a parameter: nobody is to get its gradient."""
    taken = [None if parameter is None else take_unreduced(parameter) for parameter in parameters]
    found: list[torch.Tensor | ReducedMember] = list(gradients)
    now = [number for number, one in enumerate(parameters) if one is not None and _is_reduced_now(one)]
    if not now:
        return found, None
    sums = [_with(taken[number], gradients[number], 0) for number in now]
    reduction = PackReduction([parameters[number].storage for number in now], sums, name)
    for number, member in zip(now, reduction.members, strict=True):
        found[number] = member
    return found, reduction


def _is_reduced_now(parameter: StoredTensor) -> bool:
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
    pack: Pack,
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
        spaces = _new_spaces(pack, gradients[0].dtype)
    else:
        stored = all(isinstance(grad, StoredTensor) and not grad.views for grad in grads)
        spaces = [grad.storage for grad in grads] if stored else [None]
    if None in spaces:
        return False
    if not new:
        for space in spaces:
            space.settled()
    beside = _beside(pack, spaces, gradients)
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


class _Lease:
    """What all gradients have that live side by side in host memory: it goes back when nobody has any of them."""


class _Lent:
    """Space for gradients in host memory, used again from step to step: the memory goes back when nobody has any of
    them.

    Attributes:
        spaces: those of gradients that live in one home.
    """

    def __init__(self, spaces: Sequence[TensorStorage]) -> None:
        self.spaces = spaces
        self._home, self._dtype = spaces[0].bytes.home, spaces[0].dtype
        self._lease: weakref.ref[_Lease] | None = None

    def lend(self) -> _Lease:
        """For new gradients, what is to end with them."""
        lease = _Lease()
        self._home.is_lent = True
        self._home.vacate_with(lease)
        self._lease = weakref.ref(lease)
        for space in self.spaces:
            space.lease = self._lease
        return lease

    def is_free_again(self, dtype: torch.dtype) -> bool:
        """Whether the memory that the last gradients had, of this dtype, is there for new ones; takes it, then."""
        gone = self._lease is not None and self._lease() is None
        return gone and self._dtype == dtype and self._home.occupy()


class _Beside:
    """The gradients of a pack that live side by side, in the order in which their parameters were made.

    Attributes:
        together: all of them; `nbytes` without what lies between them, and cut by `cut`.
        lent: where they are used again, if that is in host memory.
    """

    def __init__(
        self,
        spaces: Sequence[TensorStorage],
        together: StoredBytes,
        starts: Sequence[int],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        self.together = together
        lends = together.tier == "host" and all(space.share.ranks.size == 1 for space in spaces)
        self.lent = _Lent(spaces) if lends else None
        self.nbytes = sum(gradient.nbytes for gradient in gradients)
        parts = [slice(start, start + one.numel()) for start, one in zip(starts, gradients, strict=False)]
        self.cut = Cut(parts, [gradient.shape for gradient in gradients])


def _new_spaces(pack: Pack, dtype: torch.dtype) -> Sequence[TensorStorage | None]:
    """For gradients of all parameters of a pack, which have none: what is reserved on disk if it is free, or memory."""
    storages = pack.members
    if storages[0].placement.gradients == "nvme":
        return [_free_space(storage, dtype) for storage in storages]
    known = _BESIDE.get(pack)
    lent = None if known is None else known[1].lent
    if lent is not None and lent.is_free_again(dtype):
        return lent.spaces
    made = TensorStorage.gradients_side_by_side([storages[number] for number in pack.order], dtype)
    return [space for _, space in sorted(zip(pack.order, made, strict=True), key=itemgetter(0))]


def _beside(pack: Pack, spaces: Sequence[TensorStorage], gradients: Sequence[torch.Tensor]) -> _Beside | None:
    """For the gradients of all parameters, by where they live; None: not side by side. Found once for the same."""
    keys = tuple(space.key for space in spaces)
    known = _BESIDE.get(pack)
    if known is not None and known[0] == keys:
        return known[1]
    held, gradients = ([several[number] for number in pack.order] for several in ([s.bytes for s in spaces], gradients))
    starts = starts_of((gradient.numel() for gradient in gradients), held[0].dtype)
    if not all(one.follows(held[0], start) for one, start in zip(held, starts, strict=False)):
        return None
    beside = _Beside(spaces, side_by_side(held), starts, gradients)
    if beside.lent is not None or beside.together.tier == "nvme":  # other memory goes with the gradients
        _BESIDE[pack] = keys, beside
    return beside


_BESIDE: weakref.WeakKeyDictionary[Pack, tuple[tuple[int, ...], _Beside]] = weakref.WeakKeyDictionary()
"""By pack, the space of its gradients that was used last, and the keys of what is in it."""


_LENT: weakref.WeakKeyDictionary[TensorStorage, _Lent] = weakref.WeakKeyDictionary()
"""By a parameter's storage, the space of its gradient that was used last."""


def _are_all_held(storage: TensorStorage, gradients: Sequence[torch.Tensor | ReducedMember]) -> bool:
    """Of many ranks, whether gradients that leave are reduced, and all that this rank has of them. `storage`: of one of
    the parameters."""
    reduced = all(isinstance(gradient, ReducedMember) for gradient in gradients)
    return reduced and (gradients[0].whole or storage.placement.stage >= 2)


def add_gradient(parameter: StoredTensor, gradient: torch.Tensor) -> None:
    """Add this rank's gradient, which eager autograd made, to the parameter's `grad`, reduced over the ranks where it
    is to be now."""
    accumulate_gradient(parameter, reduction_of(parameter, gradient, f"a parameter of shape {tuple(parameter.shape)}"))


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
            if (before := take_unreduced(parameter)) is not None:
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
