"""Stored tensors whose bytes are of a quantised format.

What is stored, moved and gathered of one is a matrix of bytes, and its first view is the operation that makes values of
them. So it is frozen, and whoever writes to it writes values that are rounded to the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zinf_fx import ops
from zinf_fx.errors import StoredTensorError
from zinf_fx.quantisation import quantised, quantised_over, quantised_shape
from zinf_fx.runtime.tensor.views import ViewStep

_TRANSPOSITION = ViewStep(torch.ops.aten.transpose.int, (-2, -1), (), None)


class Quantised(NamedTuple):
    """How bytes become values: by which format, and of which dtype; and whether the rows that lie in the bytes are the
    columns of the tensor."""

    format: str
    dtype: torch.dtype
    transposed: bool = False

    def rows_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape [..., rows, columns] as which the values of a tensor of `shape` lie in the bytes."""
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else tuple(shape)

    def bytes_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the matrix of bytes of a tensor of `shape`."""
        return quantised_shape(self.rows_of(shape), self.format)

    def like(self, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor without values that has the metadata of one of `shape`."""
        rows = torch.empty(self.rows_of(shape), dtype=self.dtype, device="meta")
        return rows.mT if self.transposed else rows

    def steps(self, shape: Sequence[int]) -> tuple[ViewStep, ...]:
        """Return the operations that make the values of a tensor of `shape`."""
        values = ViewStep(ops.dequantize, (self.rows_of(shape)[1:], self.format, self.dtype), (), None)
        return (values, _TRANSPOSITION) if self.transposed else (values,)

    @classmethod
    def of(cls, views: Sequence[ViewStep]) -> Quantised | None:
        """Return how the bytes of a stored tensor with these views become values; None if they are values."""
        if not views or views[0].op is not ops.dequantize:
            return None
        _, name, dtype = views[0].args
        return cls(name, dtype, views[1:2] == (_TRANSPOSITION,))


class Form(NamedTuple):
    """What is stored of a tensor: the elements of a matrix of bytes where it is quantised, else its own."""

    shape: torch.Size
    dtype: torch.dtype
    quantised: Quantised | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str | None = None) -> Form:
        """Return the form of an ordinary tensor, in the format of this name."""
        if name is None:
            return cls(tensor.shape, tensor.dtype)
        return cls(torch.Size(quantised_shape(tensor.shape, name)), torch.uint8, Quantised(name, tensor.dtype))

    @property
    def numel(self) -> int:
        """How many elements are stored."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """How many bytes these elements have."""
        return self.numel * self.dtype.itemsize


def quantised_bytes(value: torch.Tensor, name: str, over: torch.Tensor | None = None) -> torch.Tensor:
    """As `quantised`, or as `quantised_over` the bytes that are there. Raises: StoredTensorError for values that the
    format doesn't have."""
    try:
        return quantised(value, name) if over is None else quantised_over(over, value, name)
    except ValueError as error:
        raise StoredTensorError(
            f"a tensor of shape {tuple(value.shape)} can't be quantised: {error}; give it finite values, or offload "
            "the model without frozen_dtype"
        ) from None


def check_trainable(shape: Sequence[int], quantised: Quantised | None, is_read_only: bool) -> None:
    """Raises: StoredTensorError for a parameter that is quantised, or read in place from a base."""
    what = f"a parameter of shape {tuple(shape)}"
    if is_read_only:
        raise StoredTensorError(
            f"{what} is read in place from a base, which can't be trained: train adapters beside it, or load the files "
            "into a model of its own with load_safetensors()"
        )
    if quantised is not None:
        raise StoredTensorError(
            f"{what} is quantised as {quantised.format}, which can't be trained: train adapters beside it, offload the "
            "model without frozen_dtype, or with patterns that leave this one out, such as [('lm_head.*', None), "
            f"('*', '{quantised.format}')]"
        )
