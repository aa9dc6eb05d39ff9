"""Where the activations of one forward graph go until backward: storages that serve again in every step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.memory.device import device_of
from zinf_fx.runtime.ranks import ALONE, Ranks
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.tiers import Tiers


class ActivationSlots:
    """For each activation of a graph that leaves, storages in which one lives from forward to backward.

    There is one for each, reserved before the first step, and more while several forward passes await their backward.
    """

    def __init__(self, plan: Plan, devices: Mapping[int, torch.device], ranks: Ranks) -> None:
        """`devices`: by the index of its tile in the forward schedule, where each activation is computed. `ranks`: over
        which those are divided that are."""
        self._ranks = ranks
        self._config = plan.config
        self._tiles = {index: plan.graph("forward").tiles[index] for index in devices}
        self._devices = devices
        # Compiled code may outlive the models that it served, and must not prolong the life of their memories.
        self._free: weakref.WeakKeyDictionary[object, dict[int, list[TensorStorage]]] = weakref.WeakKeyDictionary()

    def reserve(self, owner: object, tiers: Tiers) -> None:
        """Take the room that a step needs, if there is none yet; it is given back when `owner` is gone.

        Raises: StoreError when there is not enough.
        """
        if owner not in self._free:
            self._free[owner] = {index: [self._storage(index, tile, tiers)] for index, tile in self._tiles.items()}

    def __bool__(self) -> bool:
        """Whether any activation leaves."""
        return bool(self._tiles)

    def take(self, owner: object, index: int, tiers: Tiers) -> tuple[TensorStorage, torch.Tensor]:
        """A storage for an activation, and the token that stands for it: the storage is free when the token is gone.

        A copy of the token stands for nothing from the storage's next use on.
        """
        free = self._free[owner][index]
        storage = free.pop() if free else self._storage(index, self._tiles[index], tiers)
        storage.renew_key()
        key = _Key(storage.key.to_bytes(8, "little"))
        weakref.finalize(key, free.append, storage).atexit = False
        return storage, torch.frombuffer(key, dtype=torch.int64)[0]

    def _storage(self, index: int, tile: Tile, tiers: Tiers) -> TensorStorage:
        device = device_of(self._devices[index])
        ranks = self._ranks if tile.partitioned else ALONE
        shards = Shards.of(tile.shape[0], ranks.shards, self._config.own_placement.on_nvme)
        shard = LocalShard(shards, ranks, tile.partitioned)
        return TensorStorage(self._config, shard, Allocation(tiers, tile.tier, [shard.held], tile.dtype, device))


class _Key(bytearray):
    """The key of a storage, as the memory of a token: it lives as long as any tensor over it, however it is saved."""
