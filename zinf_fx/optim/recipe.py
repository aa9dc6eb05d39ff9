"""What the parameters of a chunk have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zinf_fx.optim.arithmetic import Group, StateLayout, snapshot
from zinf_fx.optim.states import ParameterStates
from zinf_fx.runtime.memory.device import Device


@dataclass(eq=False)
class Recipe:
    """What parameters have in common that may share a chunk: a group, the states present, place and dtype.

    Attributes:
        group: its options when the latest step took them.
        place: what updates them.
        names: the states that are streamed.
        present: those of them, and of the master, that hold values; the torch class makes the others.
        whole: each is updated whole, in a chunk of its own.
    """

    group: Group
    place: Device
    dtype: torch.dtype
    names: tuple[str, ...]
    present: frozenset[str]
    whole: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the torch class makes states, in memory of its own."""
        return not self.present.issuperset(self.names) or (self.whole and not self.names)

    def is_like(self, other: Recipe) -> bool:
        """Whether the two differ in nothing but the options of their groups."""
        ours, theirs = ((one.place, one.dtype, one.names, one.present, one.whole) for one in (self, other))
        return ours == theirs


Update = tuple[Recipe, ParameterStates]
"""How a parameter is updated, and what of it."""


class Recipes:
    """Those of one optimizer, from step to step."""

    def __init__(self) -> None:
        self._known: dict[tuple, Recipe] = {}  # by the number of the group, and more

    def begin_step(self, groups: Sequence[Group]) -> None:
        """Take over the options that the optimizer's groups have now. No earlier step is under way."""
        self._known = {key: recipe for key, recipe in self._known.items() if key[0] < len(groups)}
        for (number, *_), recipe in self._known.items():
            recipe.group = snapshot(groups[number])

    def of(self, number: int, group: Group, states: ParameterStates, layout: StateLayout, present: frozenset) -> Recipe:
        """That of a parameter in the group of this number. `present`: the states that hold values."""
        key = (number, states.place, states.dtype, tuple(layout.tensors), present, layout.whole)
        if key not in self._known:
            names = tuple(layout.tensors)
            if layout.whole:  # others may be present, and the class makes what it needs
                names = tuple(name for name in states.tensors if name in present and name not in states.masters)
            self._known[key] = Recipe(snapshot(group), states.place, states.dtype, names, present, layout.whole)
        return self._known[key]
