"""Parameters of tensor parallelism: DTensors whose local tensor is stored.

[Note: DTensor parameters]
`offload` keeps the DTensor object and gives it a stored local tensor, which is divided further over the data-parallel
ranks. A `LocalParameter`, a leaf with the same bytes, stands for it where zinf works on parameters: captured graphs
take it in place of the DTensor, so that the gradient is the local one by the time it is reduced; gradients arrive for
it; optimizers step it. Its `grad` is the local tensor of the DTensor's, where users look.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor, as_parameter, take_gradient


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, itself and not a view; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def stored_parameter(parameter: object) -> StoredTensor | None:
    """What stands for a parameter that was offloaded: itself, or of a DTensor its `LocalParameter`; else None.

    A copy of a DTensor parameter gets its own here: deepcopy copies the local tensor without knowing what of. Another
    DTensor with a stored local tensor, such as a view of a parameter, is none.
    """
    if isinstance(parameter, StoredTensor):
        return parameter
    if not isinstance(parameter, DTensor) or not isinstance(parameter, torch.nn.Parameter):
        return None
    local = local_part(parameter)
    if not isinstance(local, StoredTensor):
        return None
    if local.parameter is local:
        with torch.inference_mode(False):
            LocalParameter.of_whole(parameter, local).expect_gradient()
        if not isinstance(local_part(parameter.grad), StoredTensor):
            _store_gradient(parameter)
    local.parameter.expect_gradient()  # users freeze and unfreeze the DTensor
    return local.parameter


def local_input(value: object) -> object:
    """What a graph takes in place of `value`, which its caller gives: see [Note: DTensor parameters]."""
    parameter = stored_parameter(value)
    return value if parameter is None else parameter


def distributed_as(whole: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor placed as `whole`, whose local tensor is `local`."""
    spec = whole._spec
    spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


def placed_as(whole: DTensor, other: DTensor) -> torch.Tensor:
    """The local part of the DTensor `other` in the placements of `whole`: sums are reduced. All ranks call this."""
    if other.placements != whole.placements:
        other = other.redistribute(whole.device_mesh, whole.placements)
    local = local_part(other)
    return local.wait() if hasattr(local, "wait") else local  # of a collective that goes on


class LocalParameter(StoredTensor):
    """See [Note: DTensor parameters]."""

    _whole: weakref.ref[DTensor] | None = None  # None: of a stand-in inside a graph that is being captured

    @classmethod
    def of_whole(cls, whole: DTensor, local: StoredTensor) -> LocalParameter:
        """For the DTensor `whole`, whose local tensor is `local` from now on."""
        parameter = cls(local.token, local.base, storage=local.storage, requires_grad=whole.requires_grad)
        parameter._whole = weakref.ref(whole)
        local.parameter = as_parameter(parameter)
        whole._local_tensor = local
        return parameter

    @staticmethod
    def __tensor_unflatten__(inner: dict, context: tuple, outer_size: Any, outer_stride: Any) -> LocalParameter:
        base, _, _ = context
        return LocalParameter(inner["token"], base._replace(shape=outer_size))

    @property
    def whole(self) -> torch.Tensor:
        """The DTensor."""
        if self._whole is None:
            return self
        whole = self._whole()
        assert whole is not None, "its local tensor keeps this, and goes with it"
        return whole

    @property
    def grad(self) -> torch.Tensor | None:
        """The local tensor of the DTensor's gradient."""
        if self._whole is None:
            return torch.Tensor.grad.__get__(self)
        gradient = self.whole.grad
        return gradient if gradient is None else local_part(gradient)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._whole is None:
            torch.Tensor.grad.__set__(self, value)
        else:
            self.whole.grad = value if value is None else distributed_as(self.whole, value)

    @property
    def has_gradient_hooks(self) -> bool:
        whole = self.whole
        before, after = whole._backward_hooks or {}, whole._post_accumulate_grad_hooks or {}
        return bool(before) or any(hook is not _store_gradient for hook in after.values())

    def expect_gradient(self) -> None:
        if self._whole is None:
            return
        whole = self.whole
        if self.requires_grad != whole.requires_grad:
            self.requires_grad_(whole.requires_grad)
        if not self._expects_gradient and whole.requires_grad:
            self._expects_gradient = True
            whole.register_post_accumulate_grad_hook(_store_gradient)

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        return distributed_as(self.whole, tensor)


def _store_gradient(whole: DTensor) -> None:
    """Hook: a gradient that eager autograd left moves to the tier of gradients, in the parameter's placements."""
    parameter = stored_parameter(whole)
    if parameter is None or whole.grad is None:
        return
    if not isinstance(parameter.grad, StoredTensor):
        if not isinstance(whole.grad, DTensor):
            raise StoredTensorError(
                f"the gradient of a DTensor parameter of shape {tuple(whole.shape)} is an ordinary tensor: "
                "give DTensors"
            )
        parameter.grad = placed_as(whole, whole.grad)
    take_gradient(parameter)
