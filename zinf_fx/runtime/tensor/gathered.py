"""The full values of stored tensors, in a block of code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.tensor.local_parameter import local_part
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


@contextmanager
def gathered(
    tensors: torch.Tensor | torch.nn.Module | Iterable[torch.Tensor], modify: bool = False
) -> Iterator[torch.Tensor | list[torch.Tensor]]:
    """The full values of `tensors` as ordinary tensors; with `modify`, changes to them are written back at the end.

    Gives one tensor for a tensor, else a list in the order of the iterable (of `module.parameters()` for a module).
    Of DTensors, the values over all ranks. Ordinary tensors among them are passed as they are, so that changes to them
    take effect at once. A stored one that comes several times, as tied weights do, has one value. Nothing is written
    back when the block raises.

    Raises: StoredTensorError with `modify` for several views of one stored tensor, whose values could contradict.
    """
    single = isinstance(tensors, torch.Tensor)
    wanted = [tensors] if single else list(tensors.parameters() if isinstance(tensors, torch.nn.Module) else tensors)
    stored = {identity: t for t in wanted if (identity := _identity(t)) is not None}
    if modify and len({storage for storage, _ in stored}) < len(stored):
        raise StoredTensorError(
            "gathered() was given several views of one stored tensor with modify=True: give it the whole tensor once"
        )
    gathered = {key: _full(tensor) for key, tensor in stored.items()}
    values = [t if (identity := _identity(t)) is None else gathered[identity] for t in wanted]
    yield values[0] if single else values
    if modify:
        with torch.no_grad():
            for key, tensor in stored.items():
                tensor.copy_(_placed_as(tensor, gathered[key]))


def _identity(tensor: torch.Tensor) -> tuple[int, tuple] | None:
    """Return which storage a tensor, or its local tensor, is of, and which view of it; None where it isn't stored."""
    local = local_part(tensor)
    return (local.stored.key, local.views) if isinstance(local, StoredTensor) else None


@torch.no_grad()
def _full(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, (DTensor, StoredTensor))
    full = tensor.full_tensor()
    return full.full_tensor() if isinstance(full, StoredTensor) else full  # of a DTensor that every rank has


def _placed_as(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value`, which every rank has, divided as `tensor` is if that is a DTensor."""
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
