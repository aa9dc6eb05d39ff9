"""Who lets a stored model compute in eager code again and again is told what that costs, once for each store.

Each operation gathers the parameter that it uses, waits for it, and drops it: nothing is fetched ahead. It is right for
a look at a value, and for what a library does once; a model that trains or generates so was meant to be compiled.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.tiers import Tiers

aten = torch.ops.aten

# Of layers whose parameters are large, as dispatch shows them.
_OF_LAYERS = {
    operation.default
    for operation in (
        *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.linear, aten.matmul),
        *(aten.convolution, aten.embedding, aten._embedding_bag, aten._grouped_mm),
    )
}

# How often one parameter is read before anything is said.
_OFTEN = 3

_READ: weakref.WeakKeyDictionary[TensorStorage, int] = weakref.WeakKeyDictionary()
_TOLD: weakref.WeakSet[Tiers] = weakref.WeakSet()


def note_eager_read(operation: Any, storage: TensorStorage) -> None:
    """Note that an operation of eager code is about to gather a stored tensor."""
    if operation not in _OF_LAYERS or storage.in_place or not storage.bytes.allocation.is_reserved:
        return
    if storage.tiers in _TOLD:
        return
    _READ[storage] = times = _READ.get(storage, 0) + 1
    if times < _OFTEN:
        return
    _TOLD.add(storage.tiers)
    warnings.warn(
        f"eager code computes with parameters that are stored: {storage.name} was gathered {times} times, each time "
        "for one operation, which waits for it. Only compiled code fetches ahead. Call what torch.compile(model, "
        'backend="zinf") returns; its generate() and other methods are the uncompiled model\'s, and '
        'model.compile(backend="zinf") compiles the model for these. If it is compiled, TORCH_LOGS=graph_breaks shows '
        "what Dynamo left to Python",
        stacklevel=2,
    )
