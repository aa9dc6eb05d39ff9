"""Gradients that are ordinary tensors.

[Note: plain gradients]
Where one rank trains, and a parameter, its gradient and its states all live where graphs compute, nothing of it ever
moves. So what backward leaves in its `grad` is an ordinary tensor, contiguous, in the parameter's shape. Of the host
tier, its memory is leased from the host arena until the last tensor over it is gone. Everywhere else gradients are
stored tensors, which the optimizer's step in the background may still be reading when the training goes on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


def has_plain_gradient(storage: TensorStorage) -> bool:
    """Whether the gradient of the parameter with these bytes is an ordinary tensor: see [Note: plain gradients]."""
    share, placement = storage.share, storage.placement
    here = {"device", "host"} if storage.device.in_host_memory else {"device"}
    alone = share.ranks.size == 1 and not share.part_of
    return alone and storage.in_place and {placement.gradients, placement.optimizer} <= here


def new_plain_gradient(parameter: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """One without values yet, in the memory of its tier. Raises: StoreError when the host arena has no room."""
    storage = parameter.storage
    with torch.inference_mode(False):
        if storage.placement.gradients == "device":
            return torch.empty(parameter.shape, dtype=dtype, device=storage.device.torch_device)
        buffer = storage.usable_tiers().lease(parameter.numel() * dtype.itemsize)
        return buffer.owning_tensor(parameter.shape, dtype)


def plain_copy(parameter: StoredTensor, gradient: torch.Tensor) -> torch.Tensor:
    """A copy of `gradient`, in the memory of its tier."""
    copy = new_plain_gradient(parameter, gradient.dtype)
    with noted(parameter.storage, copy.nbytes):
        return copy.copy_(gradient)


def in_its_memory(parameter: StoredTensor, gradient: torch.Tensor) -> bool:
    """Whether an ordinary gradient may stay as it is."""
    storage = parameter.storage
    there = storage.placement.gradients == "device" or storage.tiers.host.holds(gradient)
    return there and gradient.is_contiguous() and not gradient.requires_grad


def noted(storage: TensorStorage, nbytes: int) -> AbstractContextManager[None]:
    """For a block in which a gradient is copied, or added, to where it lives."""
    leaves = storage.placement.gradients != "device"
    return RECORDER.work("offload", nbytes, CPU.torch_device) if leaves else nullcontext()
