"""transformers (4.57 to 5.24): `from_pretrained` with no more of a checkpoint in memory than it needs.

It puts the experts of a layer together: all of them, then what it made of them once more. Where these are in memory
that is mapped from files, neither takes memory that the system can't have back. And it reads a checkpoint in threads,
ahead of the modules that take its tensors over, unless the environment says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zinf_fx.compat.safetensors import MappedFiles
from zinf_fx.sizes import PIECE

# Bytes of a result that is worth a file.
_LARGE = 64 << 20
# `from_pretrained` looks for it in the environment at each call.
_LOADS_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"


@contextmanager
def loading_in_turn() -> Iterator[None]:
    """A block in which `from_pretrained` reads and converts one tensor after the other. A user's own choice stands."""
    before = os.environ.get(_LOADS_IN_TURN)
    os.environ.setdefault(_LOADS_IN_TURN, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_LOADS_IN_TURN, None)


class Converting(TorchFunctionMode):
    """A block in which large results of `torch.cat`, `torch.stack` and `Tensor.to(dtype=...)` are mapped from files, as
    the tensors are that they are made of."""

    def __init__(self, mapped: MappedFiles) -> None:
        super().__init__()
        self._mapped = mapped

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat or func is torch.stack:
            joined = self._joined(func is torch.stack, *args, **kwargs)
            if joined is not None:
                return joined
        if func is torch.Tensor.to and len(args) == 1:
            converted = self._converted(args[0], **kwargs)
            if converted is not None:
                return converted
        return func(*args, **kwargs)

    def _joined(
        self, new_dim: bool, tensors: Sequence[torch.Tensor] = (), dim: int = 0, **options: Any
    ) -> torch.Tensor | None:
        """The result; None where it is to be made as always."""
        if (
            options
            or not tensors
            or type(dim) is not int
            or not all(_is_plain(tensor, tensors[0]) for tensor in tensors)
        ):
            return None
        if sum(tensor.nbytes for tensor in tensors) < _LARGE or not self._mapped.has(tensors):
            return None
        dims = tensors[0].dim() + new_dim
        if not -dims <= dim < dims:
            return None  # is refused
        if new_dim:
            tensors = [tensor.unsqueeze(dim) for tensor in tensors]
        first = tensors[0]
        dim %= first.dim()
        shape = list(first.shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        others_of_first = first.shape[:dim] + first.shape[dim + 1 :]
        if any(tensor.shape[:dim] + tensor.shape[dim + 1 :] != others_of_first for tensor in tensors):
            return None  # is refused
        joined = self._mapped.empty(shape, first.dtype)
        start = 0
        for tensor in tensors:
            self._copy(joined.narrow(dim, start, tensor.shape[dim]), tensor)
            start += tensor.shape[dim]
        return joined

    def _converted(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None, device: object = None, **options: Any
    ) -> torch.Tensor | None:
        """The result; None where it is to be made as always."""
        if options or dtype in (None, tensor.dtype) or device not in (None, "cpu", torch.device("cpu")):
            return None
        if not _is_plain(tensor, tensor) or tensor.numel() * dtype.itemsize < _LARGE or not self._mapped.has([tensor]):
            return None
        converted = self._mapped.empty(tensor.shape, dtype)
        self._copy(converted, tensor)
        return converted

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        while source.dim() > 1 and source.shape[0] == 1:
            target, source = target[0], source[0]
        rows = max(PIECE * source.shape[0] // source.nbytes, 1)
        for start in range(0, source.shape[0], rows):
            target[start : start + rows].copy_(source[start : start + rows])
            self._mapped.trim()


def _is_plain(tensor: object, first: torch.Tensor) -> bool:
    """Whether this is an ordinary tensor with values on the CPU, of the dtype and dimensions of the first, that nobody
    differentiates."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and (tensor.dtype, tensor.dim()) == (first.dtype, first.dim())
        and tensor.dim() > 0
        and tensor.numel() > 0
    )
