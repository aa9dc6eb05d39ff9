"""What Adam keeps of a parameter: two moments of each element and, of one of low precision, a master.

They are in fp32 (mixed precision; ZeRO, section 3.1), or in the parameter's own dtype where that is wider. Moments may
be kept in another form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from zinf_fx.sizes import BLOCK

STATE_BYTES = 4
"""Bytes of an element in fp32."""

StateForm = Literal["float32", "bfloat16", "8bit"]
"""Of moments in the store, where it isn't the dtype of the update: a dtype, or codes of 8 bits with fp32 scales."""

_MOMENTS = 2
_BYTES: Mapping[StateForm, int] = {"float32": 4, "bfloat16": 2, "8bit": 1}


def has_master(itemsize: int) -> bool:
    """Whether a parameter of so many bytes per element isn't its own master."""
    return itemsize < STATE_BYTES


def state_bytes(itemsize: int, form: StateForm | None = None) -> tuple[int, ...]:
    """Bytes per element of each state of a parameter of so many bytes per element, without scales."""
    moment = max(itemsize, STATE_BYTES) if form is None else _BYTES[form]
    return (STATE_BYTES,) * has_master(itemsize) + (moment,) * _MOMENTS


def scales_nbytes(elements: int, form: StateForm | None) -> tuple[int, ...]:
    """Bytes of the scales of each state of so many elements. They are in memory where the update is."""
    return (STATE_BYTES * -(-elements // BLOCK),) * (_MOMENTS if form == "8bit" else 0)


def scratch_bytes(itemsize: int, form: StateForm | None) -> int:
    """Bytes of memory per element for what an update has in other dtypes than its own: the gradient, and moments."""
    update = max(itemsize, STATE_BYTES)
    narrowed = form is not None and _BYTES[form] < update
    return update * (1 + _MOMENTS) if narrowed else STATE_BYTES * has_master(itemsize)


def states_by_dtype(elements: int, dtype: str, itemsize: int, form: StateForm | None = None) -> Counter[str]:
    """Bytes of the states of so many elements of a parameter, by dtype."""
    master, moments = STATE_BYTES * has_master(itemsize), sum(state_bytes(itemsize, form)[-_MOMENTS:])
    found = Counter({state_dtype(dtype, itemsize): elements * master})
    found["uint8" if form == "8bit" else form or state_dtype(dtype, itemsize)] += elements * moments
    found["float32"] += sum(scales_nbytes(elements, form))
    return +found


def state_dtype(dtype: str, itemsize: float) -> str:
    """That of the states of such a parameter, which has so many bytes per element."""
    return dtype if itemsize > STATE_BYTES else "float32"
