"""State dicts, taken apart: torch would cast what is of stored parameters to their dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Group
from zinf_fx.optim.states import State
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

Fitted = Callable[[State, Group, StoredTensor], State]
"""An entry fitted to its parameter, under the options that were saved for its group."""


@contextmanager
def taking_stored(optimizer: Optimizer, fitted: Fitted) -> Iterator[dict[StoredTensor, State]]:
    """A block in which a class of torch loads a state dict without what that has for stored parameters. That is in the
    result when the block ends. Hooks that are to run when all is loaded don't run in it."""
    entries: dict[StoredTensor, State] = {}

    def take_stored(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        rest, taken = _without_stored(state_dict, optimizer.param_groups, fitted)
        entries.update(taken)
        return rest

    # The last hook to see the values, and the only place where torch would not cast them to the parameter's dtype.
    handle = optimizer.register_load_state_dict_pre_hook(take_stored)
    posts, optimizer._optimizer_load_state_dict_post_hooks = optimizer._optimizer_load_state_dict_post_hooks, {}
    try:
        yield entries
    finally:
        handle.remove()
        optimizer._optimizer_load_state_dict_post_hooks = posts


def _without_stored(
    state_dict: dict[str, Any], groups: Sequence[Group], fitted: Fitted
) -> tuple[dict[str, Any], dict[StoredTensor, State]]:
    """`state_dict` without what it has for the stored parameters of an optimizer's `groups`, and that, `fitted` to each
    parameter under the options that were saved for its group."""
    entries: dict[StoredTensor, State] = {}
    saved_groups, rest = [], dict(state_dict["state"])
    for saved, mine in zip(state_dict["param_groups"], groups, strict=False):
        if saved.get("fused") is None and "fused" in mine:  # what runs the arithmetic, not part of the state
            saved = {**saved, "fused": mine["fused"]}
        saved_groups.append(saved)
        for key, parameter in zip(saved["params"], map(stored_parameter, mine["params"]), strict=False):
            if parameter is not None and key in rest:
                entries[parameter] = fitted(rest.pop(key), saved, parameter)
    saved_groups += state_dict["param_groups"][len(saved_groups) :]
    return {**state_dict, "state": rest, "param_groups": saved_groups}, entries
