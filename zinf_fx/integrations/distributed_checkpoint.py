"""`torch.distributed.checkpoint.async_save` of stored tensors, in bounded memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zinf_fx.interrupts import held_back
from zinf_fx.runtime.tensor.distributed_checkpoint import copy_of_own
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


class Stager:
    """An `AsyncStager`: `async_save(states, checkpoint_id=..., async_stager=Stager())` copies stored tensors within the
    store, where the default stager copies them to memory.

    `async_save` returns when each rank has copied what it holds, some at a time, from where it lives to NVMe. What is
    written then is read from there, and the copies go when it is done. All else is copied in memory.
    """

    should_synchronize_after_execute = False

    @torch.no_grad()
    @held_back
    def stage(self, state_dict: dict[str, Any], **options: object) -> dict[str, Any]:
        """A copy of the state dict, which training doesn't change. Raises: StoreError where there is no room for it."""
        copies: dict[int, StoredTensor] = {}  # by storage: tied tensors are copied once

        def staged(value: Any) -> Any:
            if isinstance(value, StoredTensor) and hasattr(value, "__create_write_items__"):
                key = value.stored.key
                if key not in copies:
                    copied = copy_of_own(value.stored, value.shape)
                    copies[key] = StoredTensor.of(copied, value.shape, value.device)
                return copies[key]
            return copy.deepcopy(value.detach() if isinstance(value, torch.Tensor) else value)

        return tree_map(staged, state_dict)

    def synchronize_staging(self) -> None:
        """Nothing goes on when `stage` has returned."""

    def close(self) -> None:
        """Nothing is kept."""
