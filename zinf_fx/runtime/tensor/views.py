"""What a stored tensor is a view of, and the operations that lead from there to it.

[Note: writes to views]
In a graph that is being captured, a view of a stored tensor is a view of its gathered value: what is written to it
never reaches the store. PyTorch counts such a write as one of the tensor that the view is of, and so it can be told.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from zinf_fx.config import Config, Tier

# Views whose values are computed when they are needed.
LAZY = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)


class ViewStep(NamedTuple):
    """One operation to replay: its arguments after the tensor, and which of its results is meant (None: the only)."""

    op: torch._ops.OpOverload
    args: tuple
    kwargs: tuple[tuple[str, Any], ...]
    output: int | None

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        result = self.op(value, *self.args, **dict(self.kwargs))
        result = result if self.output is None else result[self.output]
        # Below `__torch_dispatch__`, nobody looks whether values are those of a conjugate.
        return result.resolve_conj().resolve_neg() if self.op in LAZY else result


def replayed(views: Iterable[ViewStep], value: torch.Tensor) -> torch.Tensor:
    """Return what the views show of a value."""
    for step in views:
        value = step(value)
    return value


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values that has the metadata of this one."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    whole = torch.empty((), dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Base(NamedTuple):
    """Says what the stored value is before any view, without looking at its storage. `is_part` says whether it is
    a part of a tensor that tensor parallelism divides."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    tier: Tier
    config: Config
    is_part: bool = False

    def __deepcopy__(self, memo: dict) -> Base:
        return self


class TensorMetadata(tuple):
    """What `__tensor_flatten__` says of a stored tensor besides its token: its base, its dtype, and its views.

    Dynamo keeps a copy for each parameter, and compares it with the parameter's at every call. To whoever copies it,
    this is one object, not a tuple of others: so there is one for all parameters that are alike, not two for each.
    """

    __slots__ = ()

    @classmethod
    def of(cls, base: Base, dtype: torch.dtype, views: tuple[ViewStep, ...]) -> TensorMetadata:
        """Return the metadata of a tensor with these; of tensors without views it is the same object. Without views,
        the tensor's size says the shape: a parameter's kind is the same in every layer."""
        return cls((base, dtype, views)) if views else _kind_of(base._replace(shape=None), dtype)

    def __deepcopy__(self, memo: dict) -> TensorMetadata:
        return self


@lru_cache(maxsize=64)
def _kind_of(base: Base, dtype: torch.dtype) -> TensorMetadata:
    return TensorMetadata((base, dtype, ()))


def memory_of(whole: torch.Tensor, value: torch.Tensor) -> torch.UntypedStorage:
    """Return the memory of `whole` alone, or of its view `value` where that is elsewhere: they may lie in a larger one.

    It keeps that memory, and is one object for all who hold it at a time.
    """
    owner = whole if whole.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() else value
    if owner.untyped_storage().nbytes() == owner.nbytes or owner.device.type != "cpu" or not owner.is_contiguous():
        return owner.untyped_storage()
    alone: weakref.ref[torch.UntypedStorage] | None = vars(owner).get("alone")
    storage = None if alone is None else alone()
    if storage is None:
        memory = (ctypes.c_byte * owner.nbytes).from_address(owner.data_ptr())
        vars(memory)["owner"] = owner
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        vars(owner)["alone"] = weakref.ref(storage)
    return storage


_Watched = list[tuple[torch.Tensor, int]]
_WATCHED: ContextVar[_Watched | None] = ContextVar("watched", default=None)


@contextmanager
def watching() -> Iterator[_Watched]:
    """Yield the stored tensors that are gathered in the block while a graph is captured, each with the version that it
    has unless somebody writes to a view."""
    token = _WATCHED.set(watched := [])
    try:
        yield watched
    finally:
        _WATCHED.reset(token)


def note_gathered(tensor: torch.Tensor) -> None:
    """Note a stored tensor, before a graph that is being captured gathers it, or a DTensor that is made of one."""
    if (watched := _WATCHED.get()) is not None:
        watched.append((tensor, tensor._version))


def note_written(tensor: torch.Tensor) -> None:
    """Note a write to a stored tensor itself, which PyTorch is about to count for all that share its counter.

    Which these are (what `detach()` gives does, what `.data` gives does not) shows when the counter is moved once more.
    """
    if watched := _WATCHED.get():
        before = [gathered._version for gathered, _ in watched]
        torch.autograd.graph.increment_version(tensor)
        for number, (gathered, version) in enumerate(watched):
            watched[number] = gathered, version + 2 * (gathered._version - before[number])


def is_written(watched: _Watched) -> bool:
    """Whether any of the noted tensors was written to since."""
    return any(tensor._version != version for tensor, version in watched)
