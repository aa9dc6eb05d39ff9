"""Whatever has a state: schedulers, scalers, samplers, random generators; and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from zinf_fx.checkpoint.training.parts.part import Collected, Matching
from zinf_fx.checkpoint.training.values import decode, encode


@runtime_checkable
class Stateful(Protocol):
    """As torch.distributed.checkpoint's: what can be saved and loaded by a dict."""

    def state_dict(self) -> dict[str, Any]:
        """All that is to be saved."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Be as what `state_dict` gave."""


class StatePart:
    """What has `state_dict` and `load_state_dict`, made of plain values and tensors, or a random generator."""

    def __init__(self, name: str, owner: Stateful | torch.Generator) -> None:
        self.name = name
        if isinstance(owner, torch.Generator):
            self.kind, self._get, self._set = "generator", owner.get_state, owner.set_state
        else:
            self.kind, self._get, self._set = "state", owner.state_dict, owner.load_state_dict

    def collect(self, collected: Collected) -> dict[str, Any]:
        return {"state": encode(self._get(), self.name, collected.keep)}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        matching.end.append(partial(self._set, decode(values["state"], matching.in_memory)))


class ValuePart:
    """A plain value, which is given back when it is loaded."""

    kind = "value"

    def __init__(self, name: str, value: object) -> None:
        self.name, self._value = name, value

    def collect(self, collected: Collected) -> dict[str, Any]:
        return {"value": encode(self._value, self.name, collected.keep)}
