"""Gradients arrive where they live, whole, in parts, or this rank's share, and are added to what is there."""

from __future__ import annotations

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.reduction import Reduction, synchronises
from zinf_fx.runtime.stored_tensor import StoredTensor, implement_arrival


def reserve_gradient(parameter: StoredTensor) -> None:
    """Reserve space for the first gradient, where space may run out: on disk. Later ones find what it gives back.

    Raises: StoreError when there is none, now and not in the first backward pass.
    """
    storage = parameter.storage
    if parameter.requires_grad and storage.placement.gradients == "nvme":
        storage.gradient_space = storage.for_gradient()


def _new_gradient(parameter: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """Without a value yet, on the tier of gradients."""
    storage = parameter.storage
    space, storage.gradient_space = storage.gradient_space, None
    if space is None or space.dtype != dtype:
        space = storage.for_gradient(dtype)
    return StoredTensor.of(space, parameter.shape, parameter.device)


def reduced(parameter: StoredTensor, gradient: torch.Tensor, name: str) -> torch.Tensor | Reduction:
    """What `accumulate_gradient` is to be given for this rank's `gradient`: started on its way over the ranks, with
    what was accumulated under `no_sync`. Itself where there is nothing to reduce, or not now. `name`: for errors."""
    before = parameter.grad
    waits = isinstance(before, StoredTensor) and before.storage.unreduced
    if parameter.storage.ranks.size == 1 or not (synchronises() or (before is not None and not waits)):
        return gradient
    if waits:
        gradient = gradient + before.full_tensor()
        parameter.grad = None
    return Reduction(parameter.storage, gradient, name)


def accumulate_gradient(parameter: StoredTensor, gradient: torch.Tensor | Reduction, offset: int | None = None) -> None:
    """Add `gradient` to the parameter's `grad`, as autograd would, on the tier of gradients. `offset`: where in the
    host arena's region it passes through, on its way to NVMe.

    Of many ranks, an ordinary tensor is this rank's own gradient, to be reduced later.
    """
    if isinstance(gradient, Reduction):
        average = gradient.wait()
        if not gradient.whole:
            _accumulate_share(parameter, average, offset)
            return
        gradient = average
    elif parameter.storage.ranks.size > 1 and parameter.grad is None:
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
    storage.unreduced = True
    storage.set(gradient)
    return StoredTensor.of(storage, parameter.shape, parameter.device)


def _accumulate_share(parameter: StoredTensor, share: torch.Tensor, offset: int | None) -> None:
    """Add to this rank's share of the parameter's `grad`. `share` has the size of a shard."""
    with torch.no_grad():
        if first := parameter.grad is None:
            parameter.grad = _new_gradient(parameter, share.dtype)
        elif not isinstance(parameter.grad, StoredTensor) or parameter.grad.views:
            raise StoredTensorError(
                f"the `grad` of a stored parameter of shape {tuple(parameter.shape)} was set to a tensor that this "
                "rank's share of a gradient can't be added to: set it to None, or change it with zinf_fx.gathered()"
            )
        storage = parameter.grad.storage
        if first and storage.partitioned:
            storage.set_held(share, offset)
            return
        own = storage.own
        window = storage.device_window(own.start - storage.first, len(own), load=not first, offset=offset)
        try:
            values = window.wait()
            values.copy_(share[: len(own)]) if first else values.add_(share[: len(own)])
        except BaseException:
            window.close()
            raise
        window.store()
        storage.stale = not storage.partitioned


def begin_gradient(parameter: StoredTensor) -> None:
    """Give the parameter a `grad` on the tier of gradients, whose values are undefined."""
    parameter.grad = _new_gradient(parameter, parameter.dtype)


def accumulate_gradient_part(
    parameter: StoredTensor, start: int, gradient: torch.Tensor, *, first: bool, offset: int | None = None
) -> None:
    """Add `gradient` to the elements of the parameter's `grad` from `start` on, or if `first`, write them; `offset` as
    for `accumulate_gradient`."""
    grad = parameter.grad
    with torch.no_grad():
        if not isinstance(grad, StoredTensor) or grad.views:
            grad.view(-1)[start : start + gradient.numel()].add_(gradient.reshape(-1))
            return
        window = grad.storage.device_window(start, gradient.numel(), load=not first, offset=offset)
        try:
            values = window.wait().view(gradient.shape)
            values.copy_(gradient) if first else values.add_(gradient)
        except BaseException:
            window.close()
            raise
        window.store()


def _take(parameter: StoredTensor) -> None:
    """Move a gradient that eager autograd left on the device to the tier of gradients."""
    gradient = parameter.grad
    if gradient is None or isinstance(gradient, StoredTensor) or gradient.layout != torch.strided:
        return
    parameter.grad = parameter.set_aside()
    accumulate_gradient(parameter, reduced(parameter, gradient, f"a parameter of shape {tuple(parameter.shape)}"))
    storage = parameter.storage
    if storage.consumer is not None and storage.backwards_due <= 0:
        storage.consumer.arrived(parameter)


implement_arrival(_take)
