"""What Adam keeps of a parameter: two moments of each element and, of one of low precision, a master.

They are in fp32 (mixed precision; ZeRO, section 3.1), or in the parameter's own dtype where that is wider. Moments may
be kept in another form, and masters split: what the weights don't have of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zinf_fx.sizes import BITS, BLOCK

STATE_BYTES = 4
"""Bytes of an element in fp32."""

StateForm = Literal["float32", "bfloat16", "8bit"]
"""Of moments in the store, where it isn't the dtype of the update: a dtype, or codes of 8 bits with fp32 scales."""

MasterForm = Literal["float32", "split"]
"""Of the masters of bf16 parameters: fp32, or the lower 16 bits of it, with one more bit in memory."""

SPLIT: MasterForm = "split"

UpdateForm = Literal["float32", "bfloat16", "8bit", "split, float32", "split, bfloat16", "split, 8bit"]
"""What an update computes from and to: the form of moments, beside a split master or another one."""

_MOMENTS = 2
_BYTES: Mapping[StateForm, int] = {"float32": 4, "bfloat16": 2, "8bit": 1}
_DTYPES: Mapping[StateForm, str] = {"float32": "float32", "bfloat16": "bfloat16", "8bit": "uint8"}
_SPLIT_FORMS: Mapping[StateForm, UpdateForm] = {
    "float32": "split, float32",
    "bfloat16": "split, bfloat16",
    "8bit": "split, 8bit",
}
_LOWER_BYTES = 2


def has_master(itemsize: int) -> bool:
    """Whether a parameter of so many bytes per element isn't its own master."""
    return itemsize < STATE_BYTES


def state_dtype(dtype: str, itemsize: float) -> str:
    """Return the dtype of the states of a parameter in `dtype`, which has so many bytes per element."""
    return dtype if itemsize > STATE_BYTES else "float32"


@dataclass(frozen=True)
class AdamStates:
    """The states of a parameter of `itemsize` bytes per element.

    Attributes:
        moments: what these are kept in; None: the dtype of the update.
        splits: whether a master is split.
    """

    itemsize: int
    moments: StateForm | None = None
    splits: bool = False

    @property
    def bytes_each(self) -> tuple[int, ...]:
        """Bytes per element of each state, without companions."""
        return (*self._master, *((self._moment,) * _MOMENTS))

    @property
    def nbytes(self) -> float:
        """Bytes per element of all, companions among them."""
        of_blocks = sum(self.companions_nbytes(BLOCK)) / BLOCK
        return sum(self.bytes_each) + of_blocks

    @property
    def reads_weights(self) -> bool:
        """Whether an update needs the weights too, as its masters or as a part of them."""
        return self.splits or not has_master(self.itemsize)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory per element for what an update has in other dtypes than its own: the gradient, moments, and
        split masters."""
        update = max(self.itemsize, STATE_BYTES)
        converted = _MOMENTS * (self._moment < update) + self._is_split
        return update * (1 + converted) if converted else STATE_BYTES * has_master(self.itemsize)

    @property
    def form(self) -> UpdateForm:
        """What an update computes from and to."""
        moments = self.moments or "float32"
        return _SPLIT_FORMS[moments] if self._is_split else moments

    def companions_nbytes(self, elements: int) -> tuple[int, ...]:
        """Bytes of the companion of each state of so many elements, if it has one. They are in memory where the update
        is."""
        bits, scales = self._bits_nbytes(elements), self._scales_nbytes(elements)
        return tuple(nbytes for nbytes in (bits, *((scales,) * _MOMENTS)) if nbytes)

    def nbytes_by_dtype(self, elements: int, dtype: str) -> Counter[str]:
        """Bytes of the states of so many elements of a parameter in `dtype`, by theirs."""
        own = state_dtype(dtype, self.itemsize)
        nbytes = Counter({"int16" if self._is_split else own: elements * sum(self._master)})
        nbytes[own if self.moments is None else _DTYPES[self.moments]] += elements * self._moment * _MOMENTS
        nbytes["uint8"] += self._bits_nbytes(elements)
        nbytes["float32"] += self._scales_nbytes(elements) * _MOMENTS
        return +nbytes

    def _bits_nbytes(self, elements: int) -> int:
        return -(-elements // BITS) if self._is_split else 0

    def _scales_nbytes(self, elements: int) -> int:
        return STATE_BYTES * -(-elements // BLOCK) if self.moments == "8bit" else 0

    @property
    def _is_split(self) -> bool:
        return self.splits and has_master(self.itemsize)

    @property
    def _master(self) -> tuple[int, ...]:
        return (_LOWER_BYTES if self.splits else STATE_BYTES,) * has_master(self.itemsize)

    @property
    def _moment(self) -> int:
        return max(self.itemsize, STATE_BYTES) if self.moments is None else _BYTES[self.moments]
