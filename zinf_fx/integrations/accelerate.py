"""accelerate: it compiles with this backend, and saves stored models by checkpoints, each rank its shards.

accelerate, through which transformers' Trainer compiles, accepts the backends of a closed list: importing this module
adds "zinf" to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils.dataclasses import DynamoBackend
from torch.utils.hooks import RemovableHandle

from zinf_fx.checkpoint.export import export_safetensors
from zinf_fx.checkpoint.weights import load_safetensors
from zinf_fx.integrations.checkpoints import STATES, is_stored, load_beside_weights, save_beside_weights

NAME = "ZINF"


def add_member(kind: type, name: str) -> None:
    """Let an enumeration of strings have one more member, whose value is its name."""
    member = str.__new__(kind, name)
    member._name_ = member._value_ = name
    setattr(kind, name, member)
    kind._member_map_[name] = kind._value2member_map_[name] = member
    kind._member_names_.append(name)


if NAME not in DynamoBackend.__members__:
    add_member(DynamoBackend, NAME)


class Accelerator(accelerate.Accelerator):
    """accelerate's own, whose ranks save and load stored models and their optimizers together, each its shards.

    The folder of `save_state` has the first model's weights as safetensors files, those of a second one in `model_1/`,
    and so on; a checkpoint of the optimizers, and of gradients that the first model has accumulated, in `zinf/`; and
    what else accelerate saves. Without stored models, it does what it did.
    """

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        with self._hooked(self.register_save_state_pre_hook, self._save):
            return super().save_state(output_dir, safe_serialization, **options)

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **options: Any) -> None:
        """Load what `save_state` saved. On one rank, it also loads what accelerate's own saved."""
        with self._hooked(self.register_load_state_pre_hook, self._load):
            super().load_state(input_dir, load_kwargs, **options)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the weights, as accelerate does. For a stored model, all ranks call this."""
        if is_stored(model):
            export_safetensors(model, Path(save_directory), max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)

    @contextmanager
    def _hooked(self, register: Callable[[Callable], RemovableHandle], hook: Callable[..., None]) -> Iterator[None]:
        """A block in which accelerate calls `hook`, which may take optimizers from it, after all other hooks."""
        if not any(map(is_stored, self._models)):
            yield
            return
        optimizers, handle = list(self._optimizers), register(hook)
        try:
            yield
        finally:
            self._optimizers[:] = optimizers
            handle.remove()

    def _save(self, models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        if len(weights) == len(models):  # else a hook of the user's saves them
            for number, model in enumerate(models):
                export_safetensors(model, _folder_of(number, folder))
            weights.clear()
        save_beside_weights(Path(folder, STATES), **self._named())
        self._optimizers.clear()

    def _load(self, models: list[torch.nn.Module], folder: str) -> None:
        states = Path(folder, STATES)
        if not states.is_dir():
            return
        if len(models) == len(self._models):
            for number, model in enumerate(models):
                load_safetensors(model, _folder_of(number, folder))
            models.clear()
        load_beside_weights(states, **self._named())
        self._optimizers.clear()

    def _named(self) -> dict[str, Any]:
        """Return the models and optimizers by the names that they have in a checkpoint."""
        named: dict[str, Any] = {"optimizer": None}
        for kind, objects in (("model", self._models), ("optimizer", self._optimizers)):
            named |= {kind if number == 0 else f"{kind}_{number}": owner for number, owner in enumerate(objects)}
        return named


def _folder_of(number: int, folder: str) -> Path:
    return Path(folder) if number == 0 else Path(folder, f"model_{number}")
