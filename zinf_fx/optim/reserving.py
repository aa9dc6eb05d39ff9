"""States before the first step, for what loads into them in place."""

from __future__ import annotations

import torch

from zinf_fx.errors import OptimizerError
from zinf_fx.interrupts import held_back
from zinf_fx.optim.arithmetic import states_of_zeros
from zinf_fx.optim.streamed import Streamed
from zinf_fx.optim.torn import ReservedStates
from zinf_fx.runtime.tensor.local_parameter import stored_parameter


@torch._disable_dynamo
@held_back
def reserve_states(optimizer: Streamed) -> None:
    """Have a new optimizer show its states, so that torch.distributed.checkpoint can load into them.

    `get_state_dict` and `set_state_dict` of that library take a step with zeros for gradients, all in memory, where an
    optimizer has no states. Call this before: no bytes are moved. The stored tensors in `state` have no values then,
    and stepping and saving are refused until `load_state_dict`, which `set_state_dict` calls after `dcp.load`. Where
    there are states, nothing is done.

    Raises: OptimizerError for an optimizer that isn't of `zinf_fx.optim`, or after a torn step; StoreError where there
    is no space.
    """
    if not isinstance(optimizer, Streamed):
        raise OptimizerError(
            f"reserving states of a {type(optimizer).__module__}.{type(optimizer).__qualname__} was refused: it makes "
            "them by itself; use an optimizer of zinf_fx.optim"
        )
    if optimizer.torn is not None:
        raise OptimizerError(str(optimizer.torn))
    if optimizer.state:
        return
    found = {}
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        ordinary = [parameter for parameter in trained if stored_parameter(parameter) is None]
        if ordinary:
            made = states_of_zeros(optimizer, optimizer._arithmetic, group, ordinary)
            found.update(zip(ordinary, made, strict=True))
        for parameter in trained:
            if (stored := stored_parameter(parameter)) is not None:
                found[stored.whole] = optimizer.reserved(stored, group)
    optimizer.state.update(found)
    optimizer.torn = ReservedStates("states were reserved", (), (), ())
