"""Stored parameters without bytes: what a model is planned with when its values are not there, or must not change."""

from __future__ import annotations

import torch

from zinf_fx.config import Config
from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.offload import check_storable
from zinf_fx.runtime.storage import TensorStorage
from zinf_fx.runtime.stored_tensor import StoredTensor, as_parameter


def abstract_parameter(parameter: torch.nn.Parameter, what: str, config: Config) -> StoredTensor:
    """The parameter as it would be once it is offloaded: stored on the tier that the placement says.

    `what` names it in errors. Raises: StoredTensorError for one that can't be stored.
    """
    tier = config.placement.parameters
    if isinstance(parameter, StoredTensor):
        tier = parameter.base.tier
    elif not parameter.is_meta:
        check_storable(parameter, what)
    elif type(parameter) is not torch.nn.Parameter:
        raise StoredTensorError(f"{what} is a {type(parameter).__name__}: only plain nn.Parameter can be stored")
    storage = TensorStorage.abstract(tier, config, parameter.numel(), parameter.dtype)
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    twin = StoredTensor.of(storage, parameter.shape, device, requires_grad=parameter.requires_grad)
    return as_parameter(twin)
