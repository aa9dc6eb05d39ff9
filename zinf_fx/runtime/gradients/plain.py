"""Gradients that are ordinary tensors: see [Note: plain gradients]."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


def new_plain_gradient(parameter: StoredTensor, storage: TensorStorage, dtype: torch.dtype) -> torch.Tensor:
    """One without values yet, in the memory of its tier. Raises: StoreError when the host arena has no room."""
    if storage.config.placement.gradients == "device":
        return torch.empty(parameter.shape, dtype=dtype, device=storage.device.torch_device)
    return storage.tiers.lease(storage.numel * dtype.itemsize).owning_tensor(parameter.shape, dtype)


def plain_copy(parameter: StoredTensor, storage: TensorStorage, gradient: torch.Tensor) -> torch.Tensor:
    """A copy of `gradient`, in the memory of its tier."""
    return new_plain_gradient(parameter, storage, gradient.dtype).copy_(gradient)


def leave_copy(parameter: StoredTensor, storage: TensorStorage, gradient: torch.Tensor) -> None:
    """Add `gradient` to the parameter's `grad`, which is an ordinary tensor if it is one of ours."""
    present = parameter.grad
    if present is None:
        parameter.grad = plain_copy(parameter, storage, gradient)
    else:
        present.add_(gradient)


def is_there(parameter: StoredTensor) -> bool:
    """Whether nothing is to be done about what autograd left in the parameter's `grad`, if anything."""
    gradient = parameter.grad
    if gradient is None:
        return True
    if isinstance(gradient, StoredTensor):
        return not gradient.storage.share.unreduced
    storage = parameter.storage
    if not storage.has_plain_gradient or storage.gradient.followed or type(gradient) is not torch.Tensor:
        return False
    return in_its_memory(storage, gradient)


def in_its_memory(storage: TensorStorage, gradient: torch.Tensor) -> bool:
    """Whether an ordinary gradient may stay as it is."""
    if gradient.layout is not torch.strided or gradient.requires_grad or not gradient.is_contiguous():
        return False
    return storage.config.placement.gradients == "device" or storage.tiers.host.holds(gradient)


def noted(storage: TensorStorage, nbytes: int) -> AbstractContextManager[None]:
    """For a block in which a gradient is copied, or added, to where it lives."""
    leaves = storage.placement.gradients != "device"
    return RECORDER.work("offload", nbytes, CPU.torch_device) if leaves else nullcontext()
