"""The states of the random generators that models and data loaders use unasked."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from zinf_fx.checkpoint.training.parts.part import Collected, Matching
from zinf_fx.checkpoint.training.values import decode, encode


class RandomPart:
    """PyTorch's generators, of the CPU and of each CUDA device in use, Python's, and NumPy's where it is imported."""

    kind = "random"
    name = "random"

    def collect(self, collected: Collected) -> dict[str, Any]:
        states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
        if (numpy := sys.modules.get("numpy")) is not None:
            states["numpy"] = numpy.random.get_state(legacy=True)
        return {name: encode(state, f"{self.name}.{name}", collected.keep) for name, state in states.items()}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        states = {name: decode(state, matching.in_memory) for name, state in values.items() if name != "kind"}
        matching.end += [partial(_setters()[name], state) for name, state in states.items() if name in _setters()]


def _setters() -> dict[str, Callable[[Any], None]]:
    """What sets the states of the generators that are here."""
    setters: dict[str, Callable[[Any], None]] = {"torch": torch.set_rng_state, "python": random.setstate}
    if torch.cuda.is_available():
        setters["cuda"] = _set_cuda
    if (numpy := sys.modules.get("numpy")) is not None:
        setters["numpy"] = numpy.random.set_state
    return setters


def _set_cuda(states: list[torch.Tensor]) -> None:
    """Of as many devices as there were and are."""
    for device, state in zip(range(torch.cuda.device_count()), states, strict=False):
        torch.cuda.set_rng_state(state, device)
