"""Tiles in flight where something fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zinf_fx.errors import RanksError
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.execute.flying import GatheredTile
from zinf_fx.runtime.memory.counters import Counters
from zinf_fx.runtime.memory.device import CPU


class Alone(GatheredTile):
    """One whose collectives can't begin while it is `alone`."""

    alone = True
    _count = 4

    def _fetch(self, storage: object, offset: int | None) -> None:
        pass

    def _gather(self, shards: list[torch.Tensor], name: str) -> None:
        if self.alone:
            raise RanksError(f"{name} is alone")
        self._whole.fill_(1.0)

    def _separated(self) -> torch.Tensor:
        return self._whole


def test_memory_that_nothing_was_gathered_to_is_no_value() -> None:
    """Of several that hold a tile, each finds out that its collectives don't begin."""
    storage = SimpleNamespace(key=1, version=0, device=CPU, tiers=SimpleNamespace(counters=Counters()))
    tile = Alone(storage, Tile("w", (4,), torch.float32, "nvme", None))
    for ask in (lambda: tile.allgather("w"), tile.wait, tile.wait):
        with pytest.raises(RanksError, match="w is alone"):
            ask()
    tile.alone = False
    assert tile.wait().tolist() == [1.0] * 4
