"""State dicts, taken apart: torch would cast what is of stored parameters to their dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zinf_fx.optim.arithmetic import Group
from zinf_fx.optim.states import State
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


def without_stored(
    state_dict: dict[str, Any], groups: Sequence[Group], fitted: Callable[[State, Group, StoredTensor], State]
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
