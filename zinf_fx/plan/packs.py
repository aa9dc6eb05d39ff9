"""How small parameters lie in the pack that they move in."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import torch

from zinf_fx.config import Config, Placement, Tier
from zinf_fx.plan.schedule import PackMember, Tile
from zinf_fx.sizes import blocks

# PyTorch's types of devices that compute in host memory.
IN_HOST_MEMORY = frozenset({"cpu"})
# Whether the device that is planned for has memory of its own; None: that of what is captured says.
_OWN_MEMORY: ContextVar[bool | None] = ContextVar("zinf_fx_own_memory", default=None)
# Bytes of a pack, by default: one request of the engine moves so many. A device with memory of its own copies so many
# in a tenth of a millisecond, which is less than a copy's work for the host.
_LARGEST = 4 << 20
_LARGEST_COPIED = 32 << 20
# The part of a budget that a pack may be.
_OF_BUDGET = 64


def pack_limit(config: Config, *, copied: bool) -> int | None:
    """Bytes that a pack may have; None: there are no packs. `copied`: whether tiles are copied to memory of the device
    that computes."""
    if config.pack != "auto":
        return config.pack
    budgets = (budget for budget in (config.device_memory, config.host_memory) if budget is not None)
    return min([_LARGEST_COPIED if copied else _LARGEST, *(budget // _OF_BUDGET for budget in budgets)])


K = TypeVar("K")


def in_packs(candidates: Iterable[tuple[K, Hashable, int]], limit: int) -> list[list[K]]:
    """Put candidates, each with its kind and its bytes in whole blocks, in packs: of one kind, in the order in which
    they come, and of `limit` bytes at most. What would be alone in a pack is left out."""
    packs: list[list[K]] = []
    latest: dict[Hashable, tuple[list[K], int]] = {}  # by kind, a pack and its bytes
    for candidate, kind, nbytes in candidates:
        if nbytes > limit:
            continue
        pack, taken = latest.get(kind, ([], limit + 1))
        if taken + nbytes > limit:
            pack, taken = [], 0
            packs.append(pack)
        pack.append(candidate)
        latest[kind] = pack, taken + nbytes
    return [pack for pack in packs if len(pack) > 1]


def has_own_memory(device: str) -> bool:
    """Whether what computes on devices of a type computes in memory of their own, to which tiles are copied."""
    planned = _OWN_MEMORY.get()
    return device not in IN_HOST_MEMORY if planned is None else planned


@contextmanager
def planning_for(own_memory: bool | None) -> Iterator[None]:
    """Open a block that plans for a device with memory of its own, or without; None: for that which it captures on."""
    token = _OWN_MEMORY.set(own_memory)
    try:
        yield
    finally:
        _OWN_MEMORY.reset(token)


def moves(tier: Tier | None, device: str) -> bool:
    """Whether what lives on a tier is brought to a device of this type from there."""
    return tier == "nvme" or (tier == "host" and has_own_memory(device))


def state_moves(placement: Placement, device: str, trained: bool) -> bool:
    """Whether a parameter with this placement, or what training keeps of one that is `trained`, moves to a device of
    this type, or away from it."""
    states: tuple[Tier, ...] = (placement.parameters, *((placement.gradients, placement.optimizer) if trained else ()))
    return any(moves(tier, device) for tier in states)


def may_be_packed(tile: Tile, device: str, trained: bool) -> bool:
    """Whether a parameter may move in a pack: its value moves, or the gradient of one that the graph `trained` does.

    Of many ranks, parameters of an owner, of several segments, without elements, and of a dtype of one byte, whose
    shards are no whole blocks of the store, move by themselves.
    """
    if tile.ranks * tile.replicas == 1:
        return moves(tile.tier, device) or (trained and moves(tile.gradient_tier, device))
    if tile.owned or tile.segment or not tile.numel or tile.dtype.itemsize < 2:
        return False
    return moves(tile.tier, device) or tile.partitioned or trained


def nbytes_in_pack(numel: int, dtype: torch.dtype, padded: int = 0) -> int:
    """Bytes that a parameter is counted with towards the limit of a pack. `padded`: elements of all shards together,
    where it is divided over ranks."""
    return blocks(max(numel, padded) * dtype.itemsize)


def spaced(count: int, dtype: torch.dtype) -> int:
    """Elements from the begin of a tensor of `count` to that of the next one: whole blocks of the store."""
    return blocks(count * dtype.itemsize) // dtype.itemsize


def starts_of(counts: Iterable[int], dtype: torch.dtype) -> list[int]:
    """Return where tensors of so many elements begin that lie side by side, and where the last one ends."""
    return list(accumulate((spaced(count, dtype) for count in counts), initial=0))


def gradient_offsets(pack: Tile, stage: int) -> list[int]:
    """Return where each parameter's gradient begins, in bytes, in the buffer of a pack's, at a stage of ZeRO."""
    divided = pack.ranks > 1 and stage >= 2
    counts = (member.shard if divided else member.numel for member in pack.members)
    return [start * pack.dtype.itemsize for start in starts_of(counts, pack.dtype)[:-1]]


def pack_of(tiles: Sequence[Tile]) -> Tile:
    """The tile that the tiles of some parameters are together."""
    first, further = tiles[0], len(tiles) - 1
    *starts, end = starts_of((tile.numel for tile in tiles), first.dtype)
    members = tuple(
        PackMember(tile.name, tile.shape, start, tile.shard) for tile, start in zip(tiles, starts, strict=True)
    )
    name = f"{first.name} and {further} other{'s' if further > 1 else ''}"
    return replace(first, name=name, shape=(end,), shard=sum(tile.shard for tile in tiles), members=members)
