"""Small parameters of one kind live side by side, so that they move together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from zinf_fx.config import Config
from zinf_fx.interrupts import held_back, let_through
from zinf_fx.plan.packs import has_own_memory, in_packs, nbytes_in_pack, pack_limit, state_moves
from zinf_fx.plan.sharding import Shards, shards_of
from zinf_fx.runtime.gradients.buffers import reserve_gradients
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.quantised import Form
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

K = TypeVar("K")


class _Candidate(NamedTuple, Generic[K]):
    """A parameter that may live beside others.

    Attributes:
        parameter: who it is.
        config: its options, with the placement decided.
        dtype, device: what it is stored as, and where it computes.
        shards: how it is divided.
        trained: whether it trains.
        kind: what else those have alike that live side by side.
    """

    parameter: K
    config: Config
    dtype: torch.dtype
    device: torch.device
    shards: Shards
    trained: bool
    kind: Hashable = None


def packs_of(
    parameters: Mapping[str, torch.nn.Parameter], forms: Mapping[str, Form], configs: Mapping[str, Config]
) -> list[list[str]]:
    """The names of ordinary parameters that are to be members of one group each: see [Note: groups]."""
    candidates, ranks = [], Ranks.of(next(iter(configs.values()))).shards if configs else 0
    for name, parameter in parameters.items():
        form, config = forms[name], configs[name]
        if not isinstance(parameter, DTensor):
            shards = shards_of(form.shape, form.dtype, ranks, config)
            has_no_gradient = parameter.grad is None
            stored_as = (form.dtype, parameter.device, shards, parameter.requires_grad, has_no_gradient)
            candidates.append(_Candidate(name, config, *stored_as))
    return _together(candidates)


@held_back
def bring_together(parameters: Iterable[StoredTensor]) -> None:
    """Move parameters that were stored one by one to the groups that those of one call would be in.

    Raises: StoreError when there is no room for a group beside what is to move there; all is as before then.
    """
    candidates = []
    for parameter in sorted(parameters, key=lambda parameter: parameter.stored.key):
        storage = parameter.stored
        if not storage.shard.part_of and parameter.grad is None:  # else it is divided, or held
            stored_as = (storage.dtype, parameter.device, storage.shard.shards, parameter.requires_grad)
            candidates.append(_Candidate(parameter, storage.config, *stored_as))
    for pack in _together(candidates):
        let_through()
        _move([parameter.stored for parameter in pack])
        reserve_gradients(pack)


def _together(candidates: Iterable[_Candidate[K]]) -> list[list[K]]:
    """Group the parameters that are to live side by side: small ones of one kind, in the order in which they come.
    Their options differ in the placement at most."""
    by_limit: defaultdict[int, list[tuple[K, Hashable, int]]] = defaultdict(list)  # which belongs to the device
    for parameter, config, dtype, device, shards, trained, kind in candidates:
        copied = has_own_memory(device.type)
        limit = pack_limit(config, copied=copied)
        if limit is not None and shards.is_one_part and state_moves(config.own_placement, device.type, trained):
            alike = (dtype, device, config.placement, trained, kind)
            by_limit[limit].append((parameter, alike, nbytes_in_pack(shards.numel, dtype, shards.padded)))
    return [pack for limit, of_limit in by_limit.items() for pack in in_packs(of_limit, limit)]


def _move(storages: Sequence[TensorStorage]) -> None:
    """Move the bytes of storages of one kind, which nobody uses, to one allocation."""
    first = storages[0]
    counts = [storage.shard.held for storage in storages]
    allocation = Allocation(first.tiers, first.tier, counts, first.dtype, first.device)
    moved = [StoredBytes(allocation, range(n, n + 1), (storage.token,)) for n, storage in enumerate(storages)]
    for storage, there in zip(storages, moved, strict=True):
        window = storage.settled().window().read_only()
        try:
            there.set(window.wait())
        finally:
            window.close()
    allocation.tiers.drain()
    for storage, there in zip(storages, moved, strict=True):
        storage.bytes = there
