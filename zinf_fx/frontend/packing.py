"""Small parameters of one kind live side by side, so that they move together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from zinf_fx.config import Config
from zinf_fx.interrupts import held_back, let_through
from zinf_fx.plan.packs import has_own_memory, in_packs, nbytes_in_pack, pack_limit, state_moves
from zinf_fx.plan.sharding import Shards, shards_of
from zinf_fx.runtime.gradients.spaces import reserve_gradients
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.quantised import Form
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

K = TypeVar("K")

Candidate = tuple[K, Config, torch.dtype, torch.device, Shards, bool, Hashable]
"""Who it is, its options, what it is stored as, where it computes, how it is divided, whether it trains, and what else
must be alike."""


def packs_of(
    parameters: Mapping[str, torch.nn.Parameter], forms: Mapping[str, Form], configs: Mapping[str, Config]
) -> list[list[str]]:
    """The names of ordinary parameters that are to live side by side."""
    candidates, ranks = [], Ranks.of(next(iter(configs.values()))).shards if configs else 0
    for name, one in parameters.items():
        form, config = forms[name], configs[name]
        if not isinstance(one, DTensor):
            shards = shards_of(form.shape, form.dtype, ranks, config)
            candidates.append((name, config, form.dtype, one.device, shards, one.requires_grad, one.grad is None))
    return _together(candidates)


@held_back
def bring_together(parameters: Iterable[StoredTensor]) -> None:
    """Move parameters that were stored one by one to where those of one call would be that are to live side by side.

    Raises: StoreError when there is no room for a pack beside what is to move there; all is as before then.
    """
    by_age = sorted(parameters, key=lambda parameter: parameter.storage.key)
    for pack in _together([_candidate(one) for one in by_age if _can_move(one)]):
        let_through()
        _move([parameter.storage for parameter in pack])
        reserve_gradients(pack)


def _together(several: Iterable[Candidate[K]]) -> list[list[K]]:
    """Those that are to live side by side: small ones of one kind, in the order in which they come. Their options
    differ in the placement at most."""
    by_limit: defaultdict[int, list[tuple[K, Hashable, int]]] = defaultdict(list)  # which belongs to the device
    for one, config, dtype, device, shards, trained, kind in several:
        copied = has_own_memory(device.type)
        limit = pack_limit(config, copied=copied) if config.partition != "owner" else None
        if limit is not None and len(shards.segments) == 1 and state_moves(config.own_placement, device.type, trained):
            alike = (dtype, device, config.placement, trained, kind)
            by_limit[limit].append((one, alike, nbytes_in_pack(shards.numel, dtype, shards.padded)))
    return [pack for limit, found in by_limit.items() for pack in in_packs(found, limit)]


def _candidate(parameter: StoredTensor) -> Candidate[StoredTensor]:
    storage = parameter.storage
    shards, trained = storage.share.shards, parameter.requires_grad
    return parameter, storage.config, storage.dtype, parameter.device, shards, trained, None


def _can_move(parameter: StoredTensor) -> bool:
    """Whether it isn't divided by tensor parallelism, and nobody has a gradient of it."""
    return not parameter.storage.share.part_of and parameter.grad is None


def _move(several: Sequence[TensorStorage]) -> None:
    """Move the bytes of storages of one kind, which nobody uses, to one allocation."""
    first = several[0]
    counts = [storage.share.held for storage in several]
    allocation = Allocation(first.usable_tiers(), first.tier, counts, first.dtype, first.device)
    moved = [StoredBytes(allocation, range(n, n + 1), (one.token,)) for n, one in enumerate(several)]
    for storage, there in zip(several, moved, strict=True):
        window = storage.settled().window().read_only()
        try:
            there.set(window.wait())
        finally:
            window.close()
    allocation.tiers.drain()
    for storage, there in zip(several, moved, strict=True):
        storage.bytes = there
