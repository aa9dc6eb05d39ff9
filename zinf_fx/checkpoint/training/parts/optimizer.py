"""Optimizers: of each parameter, its states as they are kept; and the options of the groups."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.checkpoint.training.manifest import SavedTensor
from zinf_fx.checkpoint.training.parts.part import Collected, Matching
from zinf_fx.checkpoint.training.values import decode, encode
from zinf_fx.errors import OptimizerError
from zinf_fx.optim.companions import Companion, companion_of, kind_of
from zinf_fx.optim.streamed import Streamed
from zinf_fx.optim.torn import TornStep
from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

LOADED_IN_PART = TornStep("a checkpoint was loaded in part", (), (), ())


class OptimizerPart:
    """An optimizer of `zinf_fx.optim` or of PyTorch. Parameters have the names that models give them, others their
    number in the optimizer."""

    kind = "optimizer"

    def __init__(self, name: str, optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self.name = name
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # accelerate wraps it
            optimizer = inner
        self.optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._names = [names.get(parameter, f"#{number}") for number, parameter in enumerate(self._parameters)]

        self._held_options: list[dict[str, Any]] | None = None

    def hold_options(self) -> None:
        """Collect the options of the groups as they are now, whatever a scheduler does meanwhile."""
        self._held_options = [copy.deepcopy(_options(group)) for group in self.optimizer.param_groups]

    def collect(self, collected: Collected) -> dict[str, Any]:
        found = self.optimizer.state_dict()
        groups = []
        for number, group in enumerate(found["param_groups"]):
            options = _options(group) if self._held_options is None else self._held_options[number]
            encoded = encode(options, f"{self.name}.param_groups[{number}]", collected.keep)
            groups.append({"params": [self._names[index] for index in group["params"]], "options": encoded})
        state = {}
        for index, entry in found["state"].items():
            what = f"{self.name}/{self._names[index]}"
            state[self._names[index]] = {k: encode(v, f"{what}.{k}", collected.keep) for k, v in entry.items()}
        rest = {name: value for name, value in found.items() if name not in ("state", "param_groups")}
        rest = encode(rest, self.name, collected.keep)
        return {"class": self._class, "groups": groups, "state": state, "rest": rest}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        if values["class"] != self._class:
            matching.differences.append(f"{self.name} is a {self._class}, and {values['class']} in the checkpoint")
            return
        groups = self._groups(values["groups"], matching)
        if groups is None:
            return
        matching.prefixes.append(f"{self.name}/")
        options_of = {number: group for group in groups for number in group["params"]}
        numbers = {name: number for number, name in enumerate(self._names)}
        state: dict[int, dict[str, Any]] = {}
        for name, entry in values["state"].items():
            if (number := numbers.get(name)) is None:
                matching.differences.append(f"{self.name} has no parameter '{name}', and states of it are saved")
                continue
            try:
                state[number] = self._entry(self._parameters[number], entry, options_of[number], matching)
            except OptimizerError as error:
                matching.differences.append(f"{self.name} can't have states of '{name}': {error}")
        rest = decode(values["rest"], matching.in_memory)
        matching.begin.append(partial(self._load, {**rest, "state": state, "param_groups": groups}))

    def _groups(self, saved: Sequence[Mapping[str, Any]], matching: Matching) -> list[dict[str, Any]] | None:
        """The groups as a state dict has them, with saved options; None: those that were saved are others."""
        mine = self.optimizer.param_groups
        if len(mine) != len(saved):
            matching.differences.append(f"{self.name} has {len(mine)} groups, and {len(saved)} in the checkpoint")
            return None
        groups, first = [], 0
        for number, (group, other) in enumerate(zip(mine, saved, strict=True)):
            params = range(first, first + len(group["params"]))
            names, first = [self._names[one] for one in params], params.stop
            matching.compare(f"parameter in group {number} of {self.name}:", names, other["params"])
            if set(names) == set(other["params"]):
                groups.append({**decode(other["options"], matching.in_memory), "params": list(params)})
        return groups if len(groups) == len(mine) else None

    @property
    def _class(self) -> str:
        kind = type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _entry(
        self, parameter: torch.Tensor, entry: Mapping[str, Any], group: Mapping[str, Any], matching: Matching
    ) -> dict[str, Any]:
        """The state of a parameter, with tensors into which the saved ones are to be read. What this optimizer keeps in
        another form is read into tensors of the saved form, and converted when everything is there."""
        stored = stored_parameter(parameter)
        is_streamed = stored is not None and isinstance(self.optimizer, Streamed)
        present: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        spaces = self.optimizer.reserved(stored, group) if is_streamed else present
        others: dict[str, StoredTensor] = {}  # in the saved form

        def find(key: str, full_name: str) -> torch.Tensor:
            saved, space = matching.saved(full_name), spaces.get(key)
            kind = kind_of(key, entry)
            is_beside_one = kind is not None and key in map(companion_of, others)
            if is_streamed and (is_beside_one or _is_in_another_form(space, saved)):
                others[key] = _in_form(stored, saved, kind)
                matching.target(full_name, stored.shown(others[key]))
                return others[key]
            if not isinstance(space, torch.Tensor) or not (is_streamed or _alike(space, saved)):
                space = _like(parameter, saved)
            matching.target(full_name, space)
            return space

        states_first = sorted(entry, key=lambda key: kind_of(key, entry) is not None)
        found = {key: decode(entry[key], partial(find, key)) for key in states_first}
        if others:
            matching.end.append(partial(self._convert, stored, others))
        mine = {name for key in others for name in (key, companion_of(key))} & spaces.keys()
        return {key: value for key, value in found.items() if key not in others} | {key: spaces[key] for key in mine}

    def _convert(self, parameter: StoredTensor, others: dict[str, StoredTensor]) -> None:
        """Take over states of a parameter that were saved in another form."""
        try:
            self.optimizer.take_entries({parameter: others})
        finally:
            self.optimizer.torn = LOADED_IN_PART

    def _load(self, state_dict: dict[str, Any]) -> None:
        try:
            self.optimizer.load_state_dict(state_dict)
        finally:
            if isinstance(self.optimizer, Streamed):
                self.optimizer.torn = LOADED_IN_PART  # it takes itself for whole then
        for number, entry in state_dict["state"].items():
            shown = self.optimizer.state[self._parameters[number]]
            for name, value in entry.items():
                mine = shown.get(name)
                if not isinstance(value, torch.Tensor) or not isinstance(mine, torch.Tensor) or mine is value:
                    continue
                # A copy, which will not be read into, or cast: torch gives states the parameter's dtype.
                if mine.device == value.device or mine.dtype != value.dtype:
                    shown[name] = value.to(mine.device)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _alike(space: torch.Tensor, saved: SavedTensor) -> bool:
    return (tuple(space.shape), space.dtype) == (saved.shape, saved.dtype)


def _is_in_another_form(space: object, saved: SavedTensor) -> bool:
    return isinstance(space, torch.Tensor) and tuple(space.shape) == saved.shape and space.dtype != saved.dtype


def _in_form(parameter: StoredTensor, saved: SavedTensor, kind: Companion | None) -> StoredTensor:
    """A tensor for a saved state of a parameter or for its companion, of a kind, without values yet."""
    storage = parameter.storage
    space = storage.for_state(saved.dtype) if kind is None else storage.for_companion(kind.dtype, kind.elements)
    return StoredTensor.of(space, parameter.shape if kind is None else saved.shape, parameter.device)


def _like(parameter: torch.Tensor, saved: SavedTensor) -> torch.Tensor:
    """A tensor for a saved state of a parameter, without values yet: of its shape, where such states live."""
    stored = stored_parameter(parameter)
    if tuple(parameter.shape) != saved.shape:
        return torch.empty(saved.shape, dtype=saved.dtype, device=parameter.device)
    if stored is None:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    return stored.shown(StoredTensor.of(stored.storage.for_state(saved.dtype), stored.shape, stored.device))
