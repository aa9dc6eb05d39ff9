"""Copies of stored tensors, on the same tier and partitioned alike."""

from __future__ import annotations

import math
from typing import TypeVar

import torch

from zinf_fx.interrupts import held_back
from zinf_fx.plan.sharding import shards_of
from zinf_fx.runtime.memory.device import device_of
from zinf_fx.runtime.tensor.quantised import Form, Quantised
from zinf_fx.runtime.tensor.storage import TensorStorage

Stored = TypeVar("Stored", bound=torch.Tensor)


@held_back
def stored_again(tensor: Stored, dtype: torch.dtype, device: torch.device, value: torch.Tensor | None = None) -> Stored:
    """A new stored tensor with the value of this one, or with `value` of any shape. Of a quantised one, the bytes are
    the same, and give values of `dtype`."""
    storage, share, target = tensor.storage, tensor.storage.share, device_of(device)
    quantised = Quantised.of(tensor.views)
    if quantised is not None and tensor.views == quantised.steps(tensor.shape) and value is None:
        quantised = quantised._replace(dtype=dtype)
        form, shape, shards = Form(tensor.base.shape, tensor.base.dtype, quantised), tensor.shape, share.shards
        source = storage.value()
    else:
        shape = tensor.shape if value is None else value.shape
        form, shards = Form(shape, dtype), share.shards
        if dtype != tensor.base.dtype or tensor.views or value is not None:
            shards = shards_of(shape, dtype, share.ranks.shards, storage.config, shards.owner)
        source = tensor.gathered() if value is None else value
    how = (form.numel, form.dtype, target, share.ranks, share.partitioned, shards)
    twin = TensorStorage(storage.tiers, storage.tier, storage.config, *how)
    twin.set(source)
    twin.share.take_state(share)
    twin.label = storage.label
    return type(tensor).of(twin, shape, target.torch_device, quantised=form.quantised)


def stored_as(tensor: Stored, quantised: Quantised) -> Stored:
    """A new stored tensor without a value yet, of the shape of this one, whose bytes are to become values in this way.

    Raises: StoreError when there is no room.
    """
    storage, share = tensor.storage, tensor.storage.share
    shape, dtype = quantised.bytes_shape(tensor.shape), torch.uint8
    shards = shards_of(shape, dtype, share.ranks.shards, storage.config, share.shards.owner)
    how = (math.prod(shape), dtype, device_of(tensor.device), share.ranks, share.partitioned, shards)
    twin = TensorStorage(storage.tiers, storage.tier, storage.config, *how)
    twin.label = storage.label
    return type(tensor).of(twin, tensor.shape, tensor.device, quantised=quantised)
