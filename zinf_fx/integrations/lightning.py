"""Strategies of Lightning for stored models: all ranks save and resume, by zinf_fx's checkpoints, in bounded memory.

A checkpoint of Lightning's is a file with all of it, which the first rank writes. Here it is a folder of the same name
with the weights as safetensors files, a checkpoint of the optimizers in `zinf/`, and Lightning's file with all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import (  # pyright: ignore[reportMissingImports]  (an optional library)
    DDPStrategy,
    SingleDeviceStrategy,
)
from torch.optim import Optimizer

from zinf_fx.checkpoint.export import export_safetensors
from zinf_fx.checkpoint.weights import load_safetensors
from zinf_fx.errors import CheckpointError
from zinf_fx.integrations.checkpoints import STATES, is_stored, load_beside_weights, save_beside_weights
from zinf_fx.runtime.gradients.reduction import no_sync

_REST, _FOLDER = "lightning.ckpt", "zinf_fx.folder"


# What `StrategyForStoredModels` stands before.
_Strategy = SingleDeviceStrategy if TYPE_CHECKING else object


class StrategyForStoredModels(_Strategy):
    """Makes a strategy of Lightning's one for a module with stored parameters. Any other it treats as it did."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict; an empty one for a stored module, whose weights are in files of their own."""
        return {} if self._is_stored else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state; an empty one for a stored module, whose optimizers have a checkpoint."""
        return {} if self._is_stored else super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """All ranks call it, as Lightning does. Raises: CheckpointError, StoreError."""
        if not self._is_stored:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(filepath)
        if self.is_global_zero:
            if folder.is_file():
                folder.unlink()
            (folder / _REST).unlink(missing_ok=True)  # it comes last: until then, nothing here is whole
        export_safetensors(self.lightning_module, folder)
        if "optimizer_states" in checkpoint:
            save_beside_weights(folder / STATES, self.lightning_module, **self._optimizers_by_name())
        super().save_checkpoint(checkpoint, folder / _REST, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Load what Lightning's loops need. Raises: CheckpointError for a folder whose save was cut off."""
        folder = Path(checkpoint_path)
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, *arguments, **options)
        if not (folder / _REST).is_file():
            raise CheckpointError(f"{folder} has no {_REST}: its save was cut off, or it is no checkpoint; use another")
        return {**super().load_checkpoint(folder / _REST, *arguments, **options), _FOLDER: str(folder)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, of a stored module from their files."""
        if _FOLDER in checkpoint:
            load_safetensors(self.lightning_module, checkpoint[_FOLDER])
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, of a stored module from their checkpoint."""
        if _FOLDER in checkpoint:
            states = Path(checkpoint[_FOLDER], STATES)
            load_beside_weights(states, self.lightning_module, **self._optimizers_by_name())
        else:
            super().load_optimizer_state_dict(checkpoint)

    @property
    def _is_stored(self) -> bool:
        return self.lightning_module is not None and is_stored(self.lightning_module)

    def _optimizers_by_name(self) -> dict[str, Optimizer | None]:
        names = ("optimizer", *(f"optimizer_{number}" for number in range(1, len(self.optimizers))))
        return {"optimizer": None, **dict(zip(names, self.optimizers, strict=False))}


class SingleDevice(StrategyForStoredModels, SingleDeviceStrategy):
    """One process: `lightning.Trainer(strategy=SingleDevice())`."""


class Ranks(StrategyForStoredModels, DDPStrategy):
    """Many processes, without DistributedDataParallel: zinf reduces the gradients.

    `lightning.Trainer(strategy=Ranks(), devices=...)`. The module offloads its network in `configure_model`, when there
    are ranks.
    """

    def configure_ddp(self) -> None:
        """Wrap a module in DistributedDataParallel if it is not stored."""
        if not self._is_stored:
            super().configure_ddp()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A block in which gradients accumulate without being reduced."""
        with no_sync() if self._is_stored else super().block_backward_sync():
            yield
