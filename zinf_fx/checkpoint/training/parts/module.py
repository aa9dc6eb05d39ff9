"""Models: parameters, persistent buffers, and what their modules give as `get_extra_state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zinf_fx.checkpoint.naming import unwrapped
from zinf_fx.checkpoint.training.parts.part import Collected, Matching
from zinf_fx.checkpoint.training.values import decode, encode

# What torch.compile puts into the names of a module's members.
_WRAPPER = "_orig_mod."


class ModulePart:
    """A model, whose members have the names that they have without what wraps it."""

    kind = "module"

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.module = unwrapped(module)

    def collect(self, collected: Collected) -> dict[str, Any]:
        tensors, extra = self._state()
        for name, tensor in tensors.items():
            collected.add(tensor, f"{self.name}/{name}")
        return {"extra": {n: encode(value, f"{self.name}/{n}", collected.keep) for n, value in extra.items()}}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        tensors, extra = self._state()
        for name, tensor in tensors.items():
            matching.target(f"{self.name}/{name}", tensor)
        matching.prefixes.append(f"{self.name}/")
        matching.compare(f"extra state of {self.name}:", extra, values["extra"])
        if extra:
            found = {name: decode(one, matching.in_memory) for name, one in values["extra"].items()}
            matching.end.append(lambda: self._load_extra(found))

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What `state_dict()` gives: tensors, and extra state."""
        state = {name.replace(_WRAPPER, ""): value for name, value in self.module.state_dict().items()}
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        return tensors, {name: value for name, value in state.items() if name not in tensors}

    def _load_extra(self, found: Mapping[str, Any]) -> None:
        names = self.module.state_dict()
        self.module.load_state_dict(
            {n: found[m] for n in names if (m := n.replace(_WRAPPER, "")) in found}, strict=False
        )


def parameter_names(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The name of each parameter of a model; the first, where it has several."""
    return {one: name.replace(_WRAPPER, "") for name, one in unwrapped(module).named_parameters()}
