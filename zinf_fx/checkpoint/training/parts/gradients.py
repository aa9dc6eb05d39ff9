"""Gradients that were accumulated so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zinf_fx.checkpoint.training.parts.part import Collected, Matching
from zinf_fx.runtime.gradients.accumulate import new_gradient
from zinf_fx.runtime.tensor.local_parameter import local_part, stored_parameter
from zinf_fx.runtime.tensor.storage import AbstractStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


class GradientsPart:
    """The `grad` of each parameter of all models that has one. One that was consumed in backward is none."""

    kind = "gradients"
    name = "gradients"

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        """`names`: those of the parameters."""
        self._names = names

    @property
    def is_filled(self) -> bool:
        """Whether there is any gradient."""
        return any(one.grad is not None and not _is_gone(one.grad) for one in self._names)

    def collect(self, collected: Collected) -> dict[str, Any]:
        of: dict[str, dict[str, bool]] = {}
        for parameter, name in self._names.items():
            gradient = parameter.grad
            if gradient is not None and not _is_gone(gradient):
                of[name] = {"alone": _is_alone(gradient)}
                collected.add(gradient, self._full_name(name, collected.rank if _is_alone(gradient) else None))
        return {"of": of}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        parameters = {name: parameter for parameter, name in self._names.items()}
        gradients: dict[str, torch.Tensor] = {}
        passed_over: set[str] = set()
        for name, how in values["of"].items():
            if name.startswith(matching.left_out):
                passed_over.add(self._full_name(name, None))
                continue
            if name not in parameters:
                matching.differences.append(f"the gradient of '{name}' is in the checkpoint alone")
                continue
            if how["alone"] and matching.ranks != matching.ranks_then:
                passed_over.add(self._full_name(name, None))
                matching.differences.append(
                    f"the gradient of '{name}' was accumulated on each of {matching.ranks_then} ranks alone, under "
                    f"no_sync, and {matching.ranks} are here: load with as many, or save after a backward pass outside"
                )
                continue
            full_name = self._full_name(name, matching.rank if how["alone"] else None)
            dtype = matching.saved(full_name).dtype
            gradients[name] = _space(parameters[name], dtype, reduced=not how["alone"])
            matching.target(full_name, gradients[name])
        matching.pass_over(passed_over)
        matching.prefixes.append(f"{self.name}/")
        for name, parameter in parameters.items():
            matching.begin.append(partial(_set, parameter, gradients.get(name)))

    def _full_name(self, name: str, rank: int | None) -> str:
        """`rank`: of a gradient that is of one alone."""
        return f"{self.name}/{name}" + ("" if rank is None else f"@{rank}")


def _is_gone(gradient: torch.Tensor) -> bool:
    local = local_part(gradient)
    return isinstance(local, StoredTensor) and isinstance(local.storage, AbstractStorage)


def _is_alone(gradient: torch.Tensor) -> bool:
    """Whether a gradient is of this rank alone."""
    local = local_part(gradient)
    return isinstance(local, StoredTensor) and local.storage.share.unreduced


def _space(parameter: torch.Tensor, dtype: torch.dtype, *, reduced: bool) -> torch.Tensor:
    """A gradient without values yet."""
    stored = stored_parameter(parameter)
    if stored is not None:
        return stored.shown(new_gradient(stored, dtype, reduced=reduced))
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    stored = stored_parameter(parameter)
    if stored is not None:
        stored.grad = local_part(gradient) if isinstance(gradient, DTensor) else gradient
    else:
        parameter.grad = gradient
