"""What an optimizer's class keeps for each stored parameter, found by trying, once for what is alike."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from zinf_fx.errors import OptimizerError
from zinf_fx.optim.arithmetic import Group, NotElementwise, StateLayout, probe
from zinf_fx.optim.whole import check_can_be_whole, whole_layout
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

# Options of groups that are remembered; a schedule of more than the learning rate makes new ones at every step.
_REMEMBERED = 64


class Layouts:
    """Layouts of the states of class `kind`, by what they depend on."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        # By the options of a group and the dtype: of pieces under None, of whole parameters by shape, as many as a
        # model has.
        self._known: dict[tuple[str, torch.dtype], dict[torch.Size | None, StateLayout | None]] = {}

    def of(
        self,
        optimizer: Optimizer,
        group: Group,
        parameter: StoredTensor,
        dtype: torch.dtype,
        *,
        state_dtype: torch.dtype | None,
        in_backward: bool,
    ) -> StateLayout:
        """The layout for `parameter`, updated in `dtype` under the group's options. `state_dtype`: of element-wise
        states in the store; `in_backward`: whether backward is to update parameters.

        Raises: OptimizerError for what can't be streamed.
        """
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise OptimizerError(f"{option}=True can't be honoured for stored parameters: leave it out")
        options = repr({k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr")})

        def of_pieces() -> StateLayout | None:
            try:
                layout = probe(optimizer, self._kind, group, dtype)
            except NotElementwise:
                return None
            return layout if state_dtype is None else layout.stored_as(state_dtype)

        known = self._known.get((options, dtype))
        if known is None:
            known = {None: of_pieces()}
            self._known = {(options, dtype): known, **dict(list(self._known.items())[: _REMEMBERED - 1])}
        if (layout := known[None]) is not None:
            return layout
        shape = parameter.shape
        check_can_be_whole(self._kind, parameter, in_backward=in_backward, narrowed=state_dtype is not None)
        if shape not in known:
            known[shape] = whole_layout(optimizer, self._kind, group, shape, dtype)
        return known[shape]
