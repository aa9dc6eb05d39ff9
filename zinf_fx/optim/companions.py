"""States of fewer bytes, and what they have beside them in memory where the update is.

[Note: companions]
A state that is kept in less than the dtype of its update may have a companion: codes of 8 bits have a scale for each
BLOCK of elements (see `blockwise`), and the lower halves of masters a bit for each element (see `split`). A companion
is a tensor of its own, one element of which belongs to so many consecutive elements of the state. They are counted from
the first element of the whole parameter. Chunks and windows begin at multiples of WINDOW_ALIGNMENT elements behind a
part that a rank updates, and such a part begins at a multiple of at least BLOCK elements (see `plan.sharding`). So no
element of a companion belongs to two of them, and states and companions are the same for any chunks and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from zinf_fx.sizes import BITS, BLOCK

MASTER = "master"
"""Name of the fp32 copy of a low-precision parameter among its states."""

MASTER_UP = "master_up"
"""Name of the companion of a split one."""

CODES = torch.uint8
"""Of states of 8 bits."""

LOWER = torch.int16
"""Of the lower halves of split masters."""

_SCALE = "_scale"


@dataclass(frozen=True)
class Companion:
    """A kind of companions: `dtype`, and how many `elements` of the state belong to one of it."""

    dtype: torch.dtype
    elements: int

    def of(self, elements: range) -> range:
        """What belongs to consecutive elements of a state; of none, none."""
        assert elements.start % self.elements == 0 or not elements, elements
        return range(-(-elements.start // self.elements), -(-elements.stop // self.elements))

    def shape(self, shape: Sequence[int]) -> torch.Size:
        """Of the companion for a parameter of `shape`."""
        return torch.Size([-(-math.prod(shape) // self.elements)])


SCALES = Companion(torch.float32, BLOCK)
UPS = Companion(torch.uint8, BITS)


def companion_of(name: str) -> str:
    """The name that the companion of state `name` has, if there is one."""
    return MASTER_UP if name == MASTER else name + _SCALE


def kind_of(name: str, names: Collection[str]) -> Companion | None:
    """What kind of companion of another state in `names` the state `name` is; None: none."""
    if name == MASTER_UP:
        return UPS if MASTER in names else None
    return SCALES if name.endswith(_SCALE) and name.removesuffix(_SCALE) in names else None


def part_of(name: str, names: Collection[str], elements: range) -> range:
    """Of the state `name`, one of `names`, what belongs to some elements of the parameter."""
    kind = kind_of(name, names)
    return elements if kind is None else kind.of(elements)


def has_companion(value: object) -> bool:
    """Whether the value of a state says nothing without its companion."""
    return isinstance(value, torch.Tensor) and value.dtype in (CODES, LOWER)
