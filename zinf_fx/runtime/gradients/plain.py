"""Gradients that are ordinary tensors: see [Note: plain gradients]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import round_up

_ALIGNMENT = 64  # bytes: a cache line


def new_plain_gradient(parameter: StoredTensor, storage: TensorStorage, dtype: torch.dtype) -> torch.Tensor:
    """One without values yet, in the memory of its tier. Raises: StoreError when the host arena has no room."""
    if storage.config.placement.gradients == "device":
        return torch.empty(parameter.shape, dtype=dtype, device=storage.device.torch_device)
    (made,) = _side_by_side(storage.tiers, [(parameter.shape, dtype)])
    return made


def _side_by_side(tiers: Tiers, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    """Tensors without values of these shapes and dtypes, in one buffer of the host arena, which goes back when nobody
    has any of them."""
    sizes = [round_up(shape.numel() * dtype.itemsize, _ALIGNMENT) for shape, dtype in kinds]
    starts = [0, *accumulate(sizes)]
    return tiers.allocate(starts.pop()).owning_tensors(
        (start, shape, dtype) for start, (shape, dtype) in zip(starts, kinds, strict=True)
    )


def plain_copy(parameter: StoredTensor, storage: TensorStorage, gradient: torch.Tensor) -> torch.Tensor:
    """A copy of `gradient`, in the memory of its tier."""
    return new_plain_gradient(parameter, storage, gradient.dtype).copy_(gradient)


def leave_copies(leaving: Sequence[tuple[StoredTensor, TensorStorage, torch.Tensor]]) -> None:
    """Add gradients to the `grad` of their parameters, which is an ordinary tensor if it is one of ours.

    Those of parameters that have none share one buffer of the host's memory, which ends with the last of them.
    `leaving`: different parameters, their storages, and the gradients. Raises: StoreError when the host arena has no
    room.
    """
    news: defaultdict[Tiers | None, list[tuple[StoredTensor, torch.Tensor]]] = defaultdict(list)
    for parameter, storage, gradient in leaving:
        if (present := parameter.grad) is not None:
            present.add_(gradient)
        elif storage.placement.gradients == "device":
            parameter.grad = plain_copy(parameter, storage, gradient)
        else:
            news[storage.tiers].append((parameter, gradient))
    for tiers, several in news.items():
        parameters, gradients = zip(*several, strict=True)
        copies = _side_by_side(tiers, [(gradient.shape, gradient.dtype) for gradient in gradients])
        torch._foreach_copy_(copies, gradients)
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.grad = copy


def is_there(parameter: StoredTensor) -> bool:
    """Whether nothing is to be done about what autograd left in the parameter's `grad`, if anything."""
    gradient = parameter.grad
    if gradient is None:
        return True
    if isinstance(gradient, StoredTensor):
        return not gradient.storage.share.unreduced
    storage = parameter.storage
    if gradient.requires_grad:  # which create_graph=True leaves, to be differentiated again
        _check_may_have_graph(parameter, storage)
        return True
    if not storage.has_plain_gradient or storage.gradient.followed or type(gradient) is not torch.Tensor:
        return False
    return in_its_memory(storage, gradient)


def _check_may_have_graph(parameter: StoredTensor, storage: TensorStorage) -> None:
    """Raises: StoredTensorError where a gradient has to be reduced or consumed now, and can't stay with its graph."""
    alone = storage.share.ranks.size == 1
    if alone and storage.gradient.consumer is None:
        return
    why = "an optimizer steps in backward" if alone else f"{storage.share.ranks.size} ranks reduce it"
    parameter.grad = parameter.set_aside()
    raise StoredTensorError(
        "backward(create_graph=True) can't leave a gradient with its graph in a stored parameter of shape "
        f"{tuple(parameter.shape)}, as {why}: take gradients with torch.autograd.grad(..., create_graph=True), and "
        "call backward() on what is computed of them"
    )


def in_its_memory(storage: TensorStorage, gradient: torch.Tensor) -> bool:
    """Whether an ordinary gradient may stay as it is."""
    if gradient.layout is not torch.strided or gradient.requires_grad or not gradient.is_contiguous():
        return False
    return storage.config.placement.gradients == "device" or storage.tiers.host.holds(gradient)


def noted(storage: TensorStorage, nbytes: int) -> AbstractContextManager[None]:
    """For a block in which a gradient is copied, or added, to where it lives."""
    leaves = storage.placement.gradients != "device"
    return RECORDER.work("offload", nbytes, CPU.torch_device) if leaves else nullcontext()
