"""Consecutive elements of a tensor that may be stored or ordinary."""

from __future__ import annotations

import torch

from zinf_fx.runtime.storage import WINDOW_ALIGNMENT, Window
from zinf_fx.runtime.stored_tensor import StoredTensor


class Slice:
    """The part of a `Window` that readers use, over an ordinary tensor."""

    def __init__(self, elements: torch.Tensor) -> None:
        self._elements = elements

    ready = True

    def wait(self) -> torch.Tensor:
        """The elements, 1-D."""
        return self._elements

    def close(self) -> None:
        """Nothing to give back."""


def open_elements(tensor: torch.Tensor, start: int, count: int) -> Window | Slice:
    """`count` elements of `tensor` from `start` on, in row-major order, to be read. Their reads start now."""
    if isinstance(tensor, StoredTensor):
        if not tensor.views:
            return tensor.storage.window(start, count)
        tensor = tensor.full_tensor()
    return Slice(tensor.detach().reshape(-1)[start : start + count])


def copy_into(target: StoredTensor, value: torch.Tensor, elements: int) -> None:
    """Write the elements of `value`, stored or not, to `target`, about `elements` of them at a time."""
    elements = max(elements // WINDOW_ALIGNMENT, 1) * WINDOW_ALIGNMENT
    for start in range(0, target.numel(), elements):
        count = min(elements, target.numel() - start)
        source = open_elements(value, start, count)
        try:
            window = target.storage.window(start, count, load=False)
            try:
                window.wait().copy_(source.wait())
                window.store()
            finally:
                window.close()
        finally:
            source.close()
