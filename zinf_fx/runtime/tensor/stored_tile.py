"""Tiles where they live."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch

from zinf_fx.errors import RanksError
from zinf_fx.plan.packs import spaced
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.memory.arena import CachedViews
from zinf_fx.runtime.tensor.local_shard import Refresh
from zinf_fx.runtime.tensor.storage import TensorStorage, begin_refresh, new_key, settle
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes, runs_of, side_by_side
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window


class TilePart(NamedTuple):
    """What of a tile lives side by side, or a rank's shards of that.

    Attributes:
        bytes: the bytes among which it lives.
        elements: which elements of these it has.
        start: where it begins among the parts of the tile.
        members: by number among the tile's parameters, which of the elements each has.
        cut: makes the parameters of memory with all of this part, if they are whole.
    """

    bytes: StoredBytes
    elements: range
    start: int
    members: dict[int, range]
    cut: CachedViews

    def window(self, offset: int | None) -> Window | DeviceWindow:
        """Open a window to be read, on the device. `offset` is where in host memory it passes through."""
        return self.bytes.device_window(self.elements.start, len(self.elements), offset=offset).read_only()


class StoredTile:
    """What a tile consists of where it lives: some elements of one storage, or the storages of a pack's parameters. It
    doesn't keep them alive.

    As a rule those of a pack live side by side, and all are one part.

    Attributes:
        order: the numbers of the members in the order in which their parameters were made.
        tiers, device, ranks, placement: those of the first member.
        gradients_live_in: the memories of its gradients, and which of these.
        partitioned: whether each rank has its shard of the members alone.
        in_place: whether all bytes of the members live where the device computes.
        has_plain_gradient: whether their gradients are ordinary tensors: see [Note: plain gradients].
    """

    def __init__(self, storages: Sequence[TensorStorage], planned: Tile) -> None:
        """Raises: RanksError for parameters that different ranks train."""
        if len({storage.shard.ranks for storage in storages}) > 1:
            raise RanksError(
                f"{planned.label} move together, and different process groups train them: offload them with pack=None"
            )
        first = storages[0]
        self._shapes = _shapes_in(planned)
        self._planned, self._key = planned, new_key() if planned.members else None
        self.tiers, self.device, self.placement = first.tiers, first.device, first.placement
        self.gradients_live_in = self.tiers, self.placement.gradients
        self.ranks, self.partitioned = first.shard.ranks, first.shard.partitioned
        self._every_tiers = {storage.tiers for storage in storages}
        self._storages = [weakref.ref(storage) for storage in storages]
        self.order = sorted(range(len(storages)), key=lambda number: storages[number].key)
        self.in_place = all(storage.in_place for storage in storages)
        self.has_plain_gradient = all(storage.has_plain_gradient for storage in storages)
        self._parts: tuple[list[StoredBytes], list[TilePart]] | None = None  # and of which bytes

    @classmethod
    def of(cls, storages: Sequence[TensorStorage], planned: Tile) -> StoredTile:
        """Return the tile of these storages, the same whenever it is asked for."""
        known = _KNOWN.setdefault(storages[0], [])
        for tile in known:
            if tile._is_of(storages, planned):
                return tile
        known[:] = [tile for tile in known if all(storage() is not None for storage in tile._storages)]
        known.append(tile := cls(storages, planned))
        return tile

    @property
    def key(self) -> int:
        """A key that no other tile has, but tiles of the same storage: theirs is the storage's."""
        return self.members[0].key if self._key is None else self._key

    @property
    def members(self) -> list[TensorStorage]:
        """The storages. Their model is alive while one of its graphs runs."""
        members = [storage for reference in self._storages if (storage := reference()) is not None]
        assert len(members) == len(self._storages), "a tile was used whose parameters are gone"
        return members

    @property
    def first(self) -> TensorStorage:
        """The first of the storages; of most tiles, the only one."""
        storage = self._storages[0]()
        assert storage is not None, "the model is alive while one of its graphs runs"
        return storage

    def _is_of(self, storages: Sequence[TensorStorage], planned: Tile) -> bool:
        if len(self._storages) != len(storages) or self._shapes != _shapes_in(planned):
            return False
        return all(mine() is storage for mine, storage in zip(self._storages, storages, strict=True))

    @property
    def version(self) -> int:
        """How often anything was written where they live."""
        return sum(part.bytes.allocation.version for part in self.parts)

    @property
    def values(self) -> list[torch.Tensor]:
        """What a graph computes with of members that are in place."""
        return [storage.part(start, shape) for storage, (start, shape) in zip(self.members, self._shapes, strict=True)]

    def settled(self) -> None:
        """Return once nothing that goes on in the background is about to change the parts."""
        members = self.members
        keys, local_shards = frozenset([storage.key for storage in members]), [storage.shard for storage in members]
        for tiers in self._every_tiers:
            settle(tiers, keys, local_shards)

    def begin_refresh(self) -> list[Refresh]:
        """Begin to refresh all members in one collective: see the function of this name."""
        if self.ranks.shards == 1 or self.partitioned:
            return []
        return begin_refresh(self.members, self._planned.label)

    @property
    def parts(self) -> list[TilePart]:
        """What of it lives side by side, in the order in which the members live, which may be another one than that in
        the plan."""
        held = [storage.bytes for storage in self.members]
        if self._parts is None or not all(map(is_, held, self._parts[0])):
            self._parts = held, self._parts_of(held)
        return self._parts[1]

    def _parts_of(self, held: Sequence[StoredBytes]) -> list[TilePart]:
        storages, shapes = self.members, self._shapes
        parts, start = [], 0
        for run in runs_of(held):
            together = side_by_side([held[number] for number in run])
            of_run: dict[int, range] = {}
            for number in run:
                first, shape = shapes[number]
                own = storages[number].shard.held_of(first, math.prod(shape))
                before = held[number].elements.start - together.elements.start
                of_run[number] = range(before + own.start, before + own.stop)
            elements = range(of_run[run[0]].start, of_run[run[-1]].stop)
            members = {n: range(own.start - elements.start, own.stop - elements.start) for n, own in of_run.items()}
            slices = [slice(own.start, own.stop) for own in members.values()]
            cut = CachedViews(slices, [shapes[number][1] for number in run])
            parts.append(TilePart(together, elements, start, members, cut))
            start += spaced(len(elements), self._planned.dtype)
        return parts


def _shapes_in(planned: Tile) -> list[tuple[int, tuple[int, ...]]]:
    """Return, of each parameter in a tile, the first element, and the shape of those that are in it."""
    return [(0, member.shape) for member in planned.members] or [(planned.start, planned.shape)]


_KNOWN: weakref.WeakKeyDictionary[TensorStorage, list[StoredTile]] = weakref.WeakKeyDictionary()
"""By the first storage, the tiles that graphs run with."""
