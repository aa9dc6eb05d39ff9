"""What an optimizer's class keeps for each stored parameter, found by trying, once for what is alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from zinf_fx.errors import OptimizerError
from zinf_fx.optim.arithmetic import Group, NotElementwise, StateLayout, probe
from zinf_fx.optim.whole import check_can_be_whole, whole_layout
from zinf_fx.runtime.stored_tensor import StoredTensor

# Layouts that are remembered; a schedule that changes more than the learning rate makes new ones at every step.
_REMEMBERED = 64


class Layouts:
    """Layouts of the states of class `kind`, by what they depend on."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        self._known: dict[tuple[str, torch.dtype, torch.Size | None], StateLayout | None] = {}

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

        layout = self._remembered((options, dtype, None), of_pieces)
        if layout is not None:
            return layout
        shape = parameter.shape
        check_can_be_whole(self._kind, parameter, in_backward=in_backward, narrowed=state_dtype is not None)
        return self._remembered(
            (options, dtype, shape), lambda: whole_layout(optimizer, self._kind, group, shape, dtype)
        )

    def _remembered(
        self, key: tuple[str, torch.dtype, torch.Size | None], find: Callable[[], StateLayout | None]
    ) -> StateLayout | None:
        if key not in self._known:
            self._known = {key: find(), **dict(list(self._known.items())[: _REMEMBERED - 1])}
        return self._known[key]
