"""Parameters of tensor parallelism: DTensors whose local tensor is stored.

[Note: DTensor parameters]
`offload` keeps the DTensor object and gives it a stored local tensor, which is divided further over the data-parallel
ranks. A `LocalParameter`, a leaf with the same bytes, stands for it where zinf works on parameters: captured graphs
take it in place of the DTensor, so that the gradient is the local one by the time it is reduced; gradients arrive for
it; optimizers step it. Its `grad` is the local tensor of the DTensor's, where users look.

The DTensor keeps its local tensor, that keeps the LocalParameter, and that knows the DTensor, weakly. But Module.to()
gives no other implementation to a tensor that anybody holds weakly. So from the local tensor's conversion, or its
detachment, with which that begins, to the next use, the LocalParameter holds the DTensor itself. Then it becomes what
stands for the local tensor that was swapped in: optimizers know it, and keep states for it.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.tensor.pending_gradient import gradient_hook
from zinf_fx.runtime.tensor.stored_tensor import (
    StoredTensor,
    as_parameter,
    hook_gradient,
    take_implementation,
)
from zinf_fx.runtime.tensor.views import TensorMetadata

T = TypeVar("T")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, itself and not a view; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def stored_in(parameter: torch.Tensor) -> list[StoredTensor]:
    """Return what stands for a parameter that was offloaded; of one that is made of several tensors, those that are
    stored."""
    if (stored := stored_parameter(parameter)) is not None:
        return [stored]
    return [stored for part in made_of(parameter).values() for stored in stored_in(part)]


def made_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return, by name, the tensors that one is made of whose class is a quantising library's, or another's that says it
    (`__tensor_flatten__`); of one that is stored, and of a DTensor, none."""
    if isinstance(tensor, (StoredTensor, DTensor)) or not is_traceable_wrapper_subclass(tensor):
        return {}
    return {attribute: getattr(tensor, attribute) for attribute in tensor.__tensor_flatten__()[0]}


def stored_parameter(parameter: object) -> StoredTensor | None:
    """Return what stands for a parameter that was offloaded: itself, or of a DTensor its `LocalParameter`; else None.

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
    leaf = local.parameter
    if not isinstance(leaf, LocalParameter) or leaf.found() is not parameter:
        with torch.inference_mode(False):
            leaf = LocalParameter.of_whole(parameter, local)
            leaf.expect_gradient()
        if parameter.grad is not None and not isinstance(local_part(parameter.grad), StoredTensor):
            _store_gradient(parameter)
    leaf.follow(parameter, local)
    leaf.expect_gradient()  # users freeze and unfreeze the DTensor
    return leaf


def local_input(value: T) -> T | StoredTensor:
    """Return what a graph takes in place of `value`, which its caller gives: see [Note: DTensor parameters]."""
    parameter = stored_parameter(value)
    return value if parameter is None else parameter


def distributed_as(whole: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor placed as `whole`, whose local tensor is `local`."""
    spec = whole._spec
    assert spec.tensor_meta is not None
    spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


def placed_as(whole: DTensor, value: DTensor) -> torch.Tensor:
    """Return the local part of the DTensor `value` in the placements of `whole`: sums are reduced. All ranks call
    this."""
    if value.placements != whole.placements:
        value = value.redistribute(whole.device_mesh, whole.placements)
    local = local_part(value)
    wait = getattr(local, "wait", None)  # of a collective that goes on
    return local if wait is None else wait()


_GRAD: Any = torch.Tensor.grad  # the property, which PyTorch's stub shows as its value


class LocalParameter(StoredTensor):
    """See [Note: DTensor parameters]."""

    # None: of a stand-in inside a graph that is being captured
    _whole: weakref.ref[DTensor] | DTensor | None = None

    @classmethod
    def of_whole(cls, whole: DTensor, local: StoredTensor) -> LocalParameter:
        """Make the local parameter of the DTensor `whole`, whose local tensor is `local` from now on."""
        parameter = cls(local.token, local.base, storage=local.stored, requires_grad=whole.requires_grad)
        parameter._whole = weakref.ref(whole)
        local.parameter = as_parameter(parameter)
        whole._local_tensor = local
        return parameter

    @staticmethod
    def __tensor_unflatten__(inner: dict, kind: TensorMetadata, outer_size: Any, outer_stride: Any) -> LocalParameter:
        base, _, _ = kind
        return LocalParameter(inner["token"], base._replace(shape=outer_size))

    def found(self) -> DTensor | None:
        """Return the DTensor, if there still is one: what was detached from its local tensor keeps this, too."""
        return self._whole() if isinstance(self._whole, weakref.ref) else self._whole

    @property
    def whole(self) -> torch.Tensor:
        """The DTensor."""
        return self if self._whole is None else self._distributed()

    def _distributed(self) -> DTensor:
        whole = self.found()
        assert whole is not None, "who works on this has it from the DTensor"
        return whole

    def hold(self) -> None:
        self._whole = self.found()

    def follow(self, whole: DTensor, local: StoredTensor) -> None:
        """Know the DTensor weakly, and stand for `local`, its local tensor by now."""
        if isinstance(self._whole, DTensor):
            self._whole = weakref.ref(whole)
        if self.token is not local.token:
            with torch.inference_mode(False):
                take_implementation(self, LocalParameter(local.token, local.base, storage=local.stored))

    @property
    def grad(self) -> torch.Tensor | None:
        """The local tensor of the DTensor's gradient."""
        if self._whole is None:
            return _GRAD.__get__(self)
        gradient = self.whole.grad
        return gradient if gradient is None else local_part(gradient)

    # PyTorch's stub has the value in the place of the property.
    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._whole is None:
            _GRAD.__set__(self, value)
        else:
            whole = self._distributed()
            whole.grad = value if value is None else distributed_as(whole, value)

    @property
    def has_gradient_hooks(self) -> bool:
        whole = self.whole
        before, after = whole._backward_hooks or {}, whole._post_accumulate_grad_hooks or {}
        return bool(before) or any(hook is not _store_gradient for hook in after.values())

    def expect_gradient(self) -> None:
        whole = self.found()
        if whole is None:
            return
        if self.requires_grad != whole.requires_grad:
            self.requires_grad_(whole.requires_grad)
        local = local_part(whole)
        assert isinstance(local, StoredTensor)
        if not local.expects_gradient and whole.requires_grad:
            local.expects_gradient = True  # goes where the implementation of the DTensor goes
            hook_gradient(whole, _store_gradient)

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        return distributed_as(self._distributed(), tensor)


def _store_gradient(whole: torch.Tensor) -> None:
    """Move a gradient that eager autograd left to the tier of gradients, in the parameter's placements. This is a
    hook."""
    assert isinstance(whole, DTensor)
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
    gradient_hook(parameter)
