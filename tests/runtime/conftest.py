"""What the tests of the runtime share: the tiers, and a count of the values that are in memory together."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zinf_fx.runtime.tensor.storage import TensorStorage


@pytest.fixture(params=["device", "host", "nvme"])
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def values_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many full values of tensors on disk were alive together, noted at every gather."""
    alive: list[StorageWeakRef] = []
    counts: list[int] = []
    value_of = TensorStorage.value

    def value(storage: TensorStorage) -> torch.Tensor:
        result = value_of(storage)
        if not storage.in_place:
            alive[:] = [ref for ref in alive if not ref.expired()]
            alive.append(StorageWeakRef(result.untyped_storage()))
            counts.append(len(alive))
        return result

    monkeypatch.setattr(TensorStorage, "value", value)
    return counts
