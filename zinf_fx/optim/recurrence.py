"""What a step worked out serves in the next one, while that finds the same objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

_token = attrgetter("token")


class Recurrence:
    """Remembers, by identity, what a step finds of some parameters, and says whether the next one finds the same.

    It compares whole lists in C: this runs in each step, for each parameter.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        stored: Iterable[StoredTensor],
        shown: Mapping[torch.Tensor, dict[str, Any]],
        layouts: Iterable[object],
    ) -> None:
        """Remember `parameters`; of the `stored` ones among them, their tokens, because a parameter that gets another
        storage gets another token, and the values of their states; all entries of `shown`, the optimizer's state; and
        `layouts` of states."""
        self._parameters, self._layouts = list(parameters), list(layouts)
        self._stored = list(stored)
        self._tokens = list(map(_token, self._stored))
        self._shown = shown
        self._stored_entries = [shown[parameter] for parameter in self._stored]
        self.note_states()

    def note_states(self) -> None:
        """Remember the states that the optimizer shows now."""
        self._entries = list(self._shown.values())
        self._values = values_of(self._stored_entries)

    def comes_again(
        self,
        parameters: Sequence[torch.Tensor],
        shown: Mapping[torch.Tensor, dict[str, Any]],
        layouts: Sequence[object],
    ) -> bool:
        """Whether all are the same objects in the same order."""
        return (
            shown is self._shown
            and same_objects(parameters, self._parameters)
            and same_objects(layouts, self._layouts)
            and same_objects(list(map(_token, self._stored)), self._tokens)
            and same_objects(list(shown.values()), self._entries)
            and same_objects(values_of(self._stored_entries), self._values)
        )


def values_of(states: Iterable[dict[str, Any]]) -> list[object]:
    """Return all values of some entries."""
    return list(chain.from_iterable(map(dict.values, states)))


def same_objects(mine: Sequence[object], theirs: Sequence[object]) -> bool:
    """Whether they are the same objects in the same order."""
    return len(mine) == len(theirs) and all(map(is_, mine, theirs))
