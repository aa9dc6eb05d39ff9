"""What an optimizer has besides parameters and their states: the options of its groups, and its attributes.

Some classes change these at each step: a counter of steps in the group, a flag on the optimizer. What changes alike
over any parameters is not a coupling of parameters: the step of a stand-in shows it. See `rehearsal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch.optim import Optimizer

# What torch.optim's classes note on themselves when they have looked at their parameters for the first time.
_CHECKED_ONCE = {"_need_device_dtype_check_for_fused"}
_NOT_KEPT = {"param_groups", "state", "defaults", *_CHECKED_ONCE}


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values; tensors, lists and dicts are copies, which nothing that works in place reaches."""
    return {name: _copy(value) for name, value in values.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return copied(value)
    return [*map(_copy, value)] if type(value) is list else value


@dataclass(frozen=True)
class Kept:
    """What an optimizer has at a moment, or what changed of it.

    Attributes:
        groups: options of each group, by name.
        attributes: of the optimizer itself.
    """

    groups: list[dict[str, Any]]
    attributes: dict[str, Any]

    @staticmethod
    def of(optimizer: Optimizer) -> Kept:
        """What `optimizer` has now."""
        groups = [copied({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        return Kept(groups, copied({k: v for k, v in vars(optimizer).items() if k not in _NOT_KEPT}))

    def since(self, before: Kept) -> Kept:
        """What is otherwise than `before`."""
        groups = [_changed(mine, earlier) for mine, earlier in zip(self.groups, before.groups, strict=True)]
        return Kept(groups, _changed(self.attributes, before.attributes))

    @property
    def options(self) -> set[str]:
        """Names of all options."""
        return {name for group in self.groups for name in group}

    def set_in(self, optimizer: Optimizer) -> None:
        """Let an optimizer with these groups have what this has."""
        for group, options in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(options)
        vars(optimizer).update(self.attributes)


def differing(moves: Iterable[Kept]) -> list[str]:
    """Names of what steps over different parameters changed differently: it depends on the parameters."""
    first, *others = moves
    names: dict[str, None] = {}
    for other in others:
        for mine, theirs in zip((*first.groups, first.attributes), (*other.groups, other.attributes), strict=True):
            names |= dict.fromkeys([*_changed(mine, theirs), *_changed(theirs, mine)])
    return list(names)


def _changed(values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k not in before or not same_value(v, before[k])}


def same_value(one: object, other: object) -> bool:
    """Whether two options or attributes are the same object, or equal: numbers, texts, tensors, collections of them."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_value(value, other[name]) for name, value in one.items())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same_value, one, other))
    return isinstance(one, (Number, str)) and (one == other or (one != one and other != other))
