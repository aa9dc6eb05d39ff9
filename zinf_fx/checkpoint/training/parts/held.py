"""A part as it was when a step was over that still goes on in the background."""

from __future__ import annotations

from typing import Any

import torch

from zinf_fx.checkpoint.training.parts.part import Collected, Part
from zinf_fx.runtime.tensor.local_parameter import local_part
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

LARGEST = 16 << 20
"""Bytes of tensors in memory that are copied to hold a part, at most."""


class TooLargeError(Exception):
    """A part has more in memory than is copied."""


class HeldPart:
    """A part with the values and the tensors in memory that it had at construction. Elements of stored tensors, which
    only steps change, are read when it is collected.

    Attributes:
        part: the part itself.
    """

    def __init__(self, part: Part) -> None:
        """Raises: TooLargeError; CheckpointError as `collect`."""
        self.part, self.kind = part, part.kind
        copies = _Copies()
        self._values = part.collect(copies)
        self._tensors = copies.made

    def collect(self, collected: Collected) -> dict[str, Any]:
        for name, tensor in self._tensors.items():
            collected.add(tensor, name)
        return self._values


class _Copies(Collected):
    """Collects copies of what is in memory.

    Attributes:
        made: by name, the copies, and stored tensors themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, torch.Tensor] = {}
        self._nbytes = 0

    def add(self, tensor: torch.Tensor, name: str) -> str:
        super().add(tensor, name)
        if name in self.same:
            self.made[name] = self.made[self.same[name]]
        elif isinstance(local_part(tensor), StoredTensor):
            self.made[name] = tensor
        else:
            self._nbytes += tensor.nbytes
            if self._nbytes > LARGEST:
                raise TooLargeError
            self.made[name] = tensor.detach().clone()
        return name
