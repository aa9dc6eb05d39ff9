"""What one optimizer keeps of its stored parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zinf_fx.optim.arithmetic import StateLayout
from zinf_fx.optim.states import MASTER, ParameterStates, State, working_dtype
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

    def dtype(self, parameter: StoredTensor) -> torch.dtype:
        """Of the update. Raises: OptimizerError for a parameter that can't be updated in pieces."""
        dtype = working_dtype(parameter)
        return dtype if self._masters else parameter.dtype

    def reserve(
        self, parameter: StoredTensor, layout: StateLayout, shown: Mapping[torch.Tensor, State]
    ) -> ParameterStates:
        """Make room for the states of a parameter, as `ParameterStates.reserve`. `shown`: the optimizer's `state`."""
        dtype = self.dtype(parameter)
        states = self.states.get(parameter)
        if states is None:
            states = self.states[parameter] = ParameterStates(parameter, dtype)
        states.reserve(layout, dtype)
        if not states.has_master and parameter.whole in shown:
            shown[parameter.whole].pop(MASTER, None)
        return states
