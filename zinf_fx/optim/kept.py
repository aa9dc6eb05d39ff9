"""What one optimizer keeps of its stored parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch

from zinf_fx.optim.arithmetic import StateLayout
from zinf_fx.optim.companions import MASTER, MASTER_UP, kind_of
from zinf_fx.optim.states import ParameterStates, State, by_allocation, follows, working_dtype
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


class KeptStates:
    """Where the states of an optimizer's stored parameters live.

    Attributes:
        states: of each parameter for which room was made.
    """

    def __init__(self, *, masters: bool) -> None:
        """`masters`: whether parameters of low precision are updated through an fp32 copy."""
        self._masters = masters
        self.states: dict[StoredTensor, ParameterStates] = {}
        self._spaces: dict[StoredTensor, dict[str, TensorStorage]] = {}  # of parameters to come

    def dtype(self, parameter: StoredTensor) -> torch.dtype:
        """Of the update. Raises: OptimizerError for a parameter that can't be updated in pieces."""
        dtype = working_dtype(parameter)
        return dtype if self._masters else parameter.dtype

    def make_room(self, layouts: Mapping[StoredTensor, StateLayout]) -> None:
        """Before `reserve`: make room for the states of those among some parameters that live side by side, each with
        its layout, so that these live side by side too. Raises: StoreError when there is none."""
        runs: list[list[tuple[StoredTensor, StateLayout]]] = []
        for parameter in chain.from_iterable(by_allocation(layouts)):
            one = parameter, layouts[parameter]
            if runs and _joins(*runs[-1][-1], *one):
                runs[-1].append(one)
            else:
                runs.append([one])
        for run in runs:
            if len(run) > 1:
                self._make_room(run)

    def _make_room(self, together: Sequence[tuple[StoredTensor, StateLayout]]) -> None:
        first, layout = together[0]
        storages = [parameter.storage for parameter, _ in together]
        dtype = self.dtype(first)
        names = {**layout.of_master(first.dtype, dtype), **layout.tensors}
        kinds = {name: kind_of(name, names) for name in names}
        rows = {
            name: TensorStorage.states_side_by_side(storages, kept_in)
            if (kind := kinds[name]) is None
            else TensorStorage.companions_side_by_side(storages, kind.dtype, kind.elements)
            for name, kept_in in names.items()
        }
        for number, (parameter, _) in enumerate(together):
            self._spaces[parameter] = {name: row[number] for name, row in rows.items()}

    def reserve(
        self, parameter: StoredTensor, layout: StateLayout, shown: Mapping[torch.Tensor, State]
    ) -> ParameterStates:
        """Make room for the states of a parameter, as `ParameterStates.reserve`. `shown`: the optimizer's `state`."""
        dtype = self.dtype(parameter)
        states = self.states.get(parameter)
        if states is None:
            states = self.states[parameter] = ParameterStates(parameter, dtype, self._spaces.pop(parameter, None))
        states.reserve(layout, dtype)
        if not states.has_master and parameter.whole in shown:
            for name in (MASTER, MASTER_UP):
                shown[parameter.whole].pop(name, None)
        return states

    def load(
        self,
        entries: Mapping[StoredTensor, State],
        layout_of: Callable[[StoredTensor], StateLayout],
        shown: Mapping[torch.Tensor, State],
    ) -> None:
        """Copy the values of entries that fit to where they live. `shown`: the optimizer's `state`.

        Raises: StoreError; some are copied then.
        """
        for parameter, entry in entries.items():
            layout = layout_of(parameter)
            states = self.reserve(parameter, layout, shown)
            states.version = None
            shown[parameter.whole].update(states.load(entry, layout))
        for tiers in {parameter.storage.tiers for parameter in entries}:
            tiers.drain()


def _joins(one: StoredTensor, layout: StateLayout, other: StoredTensor, next_layout: StateLayout) -> bool:
    """Whether the second parameter lives behind the first, and both have the same states, of their own shape."""
    if layout.whole or dict(layout.tensors) != dict(next_layout.tensors):
        return False
    return follows(other, one)
