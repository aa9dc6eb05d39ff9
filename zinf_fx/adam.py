"""What Adam keeps of a parameter: two moments of each element and, of one of low precision, a master.

They are in fp32 (mixed precision; ZeRO, section 3.1), or in the parameter's own dtype where that is wider.
"""

from __future__ import annotations

STATE_BYTES = 4
"""Bytes of an element in fp32."""


def has_master(itemsize: int) -> bool:
    """Whether a parameter of so many bytes per element isn't its own master."""
    return itemsize < STATE_BYTES


def state_bytes(itemsize: int) -> tuple[int, ...]:
    """Bytes per element of each state of a parameter of so many bytes per element."""
    return (max(itemsize, STATE_BYTES),) * (3 if has_master(itemsize) else 2)


def state_dtype(dtype: str, itemsize: float) -> str:
    """That of the states of such a parameter, which has so many bytes per element."""
    return dtype if itemsize > STATE_BYTES else "float32"
