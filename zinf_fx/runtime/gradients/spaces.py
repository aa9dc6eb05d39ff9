"""Where gradients live, which are made anew in each step: in the same place again, side by side as their parameters
are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

import torch

from zinf_fx.plan.packs import starts_of
from zinf_fx.runtime.memory.arena import CachedViews
from zinf_fx.runtime.tensor.gradient_state import GradientState
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes, side_by_side
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.stored_tile import StoredTile

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


def free_space(storage: TensorStorage, dtype: torch.dtype) -> TensorStorage | None:
    """What is reserved for the gradient, if nobody has it and it is of this dtype."""
    unused = sys.getrefcount(storage.gradient.space) <= _UNUSED
    return storage.gradient.space if unused and storage.gradient.space.dtype == dtype else None


def lent_gradient(parameter: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """A gradient without values yet, in host memory, where the last one was, if that is free."""
    storage = parameter.storage
    lent = _LENT.get(storage)
    if lent is None or not lent.is_free_again(dtype):
        lent = _LENT[storage] = _Lent([storage.for_gradient(dtype)])
    lease = lent.lend()
    gradient = StoredTensor.of(lent.spaces[0], parameter.shape, parameter.device)
    del lease  # which the gradient holds, and what is made of it
    return gradient


class _Lease:
    """What all gradients have that live side by side in host memory: it goes back when nobody has any of them."""


class _Lent:
    """Space for gradients in host memory, used again from step to step: the memory goes back when nobody has any of
    them.

    Attributes:
        spaces: those of gradients that live in one allocation.
    """

    def __init__(self, spaces: Sequence[TensorStorage]) -> None:
        self.spaces = spaces
        self._allocation, self._dtype = spaces[0].bytes.allocation, spaces[0].dtype
        self._lease: weakref.ref[_Lease] | None = None

    def lend(self) -> _Lease:
        """For new gradients, what is to end with them."""
        lease = _Lease()
        self._allocation.is_lent = True
        self._allocation.vacate_with(lease)
        self._lease = weakref.ref(lease)
        for space in self.spaces:
            space.lease = self._lease
        return lease

    def is_free_again(self, dtype: torch.dtype) -> bool:
        """Whether the memory that the last gradients had, of this dtype, is there for new ones; takes it, then."""
        gone = self._lease is not None and self._lease() is None
        return gone and self._dtype == dtype and self._allocation.occupy()


class Beside:
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
        self.cut = CachedViews(parts, [gradient.shape for gradient in gradients])


def new_spaces(pack: StoredTile, dtype: torch.dtype) -> Sequence[TensorStorage | None]:
    """For gradients of all parameters of a pack, which have none: what is reserved on disk if it is free, or memory."""
    storages = pack.members
    if storages[0].placement.gradients == "nvme":
        return [free_space(storage, dtype) for storage in storages]
    known = _BESIDE.get(pack)
    lent = None if known is None else known[1].lent
    if lent is not None and lent.is_free_again(dtype):
        return lent.spaces
    made = TensorStorage.gradients_side_by_side([storages[number] for number in pack.order], dtype)
    return [space for _, space in sorted(zip(pack.order, made, strict=True), key=itemgetter(0))]


def beside_again(pack: StoredTile, spaces: Sequence[TensorStorage]) -> Beside | None:
    """What `beside_of` found, if the gradients live where those of this pack lived last."""
    known = _BESIDE.get(pack)
    return known[1] if known is not None and known[0] == tuple(space.key for space in spaces) else None


def beside_of(pack: StoredTile, spaces: Sequence[TensorStorage], gradients: Sequence[torch.Tensor]) -> Beside | None:
    """For the gradients of all parameters, by where they live; None: not side by side. Found once for the same."""
    if (known := beside_again(pack, spaces)) is not None:
        return known
    held, gradients = ([several[number] for number in pack.order] for several in ([s.bytes for s in spaces], gradients))
    starts = starts_of((gradient.numel() for gradient in gradients), held[0].dtype)
    if not all(second.follows(first) for first, second in pairwise(held)):
        return None
    beside = Beside(spaces, side_by_side(held), starts, gradients)
    if beside.lent is not None or beside.together.tier == "nvme":  # other memory goes with the gradients
        _BESIDE[pack] = tuple(space.key for space in spaces), beside
    return beside


_BESIDE: weakref.WeakKeyDictionary[StoredTile, tuple[tuple[int, ...], Beside]] = weakref.WeakKeyDictionary()
"""By pack, the space of its gradients that was used last, and the keys of what is in it."""


_LENT: weakref.WeakKeyDictionary[TensorStorage, _Lent] = weakref.WeakKeyDictionary()
"""By a parameter's storage, the space of its gradient that was used last."""
