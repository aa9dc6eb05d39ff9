"""Parameters that move together: see `passes.tiling.pack`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from zinf_fx.errors import RanksError
from zinf_fx.plan.packs import spaced
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.memory.arena import CachedViews
from zinf_fx.runtime.recorder import RECORDER, REFRESH
from zinf_fx.runtime.tensor.share import PackRefresh, Refresh
from zinf_fx.runtime.tensor.storage import TensorStorage, new_key
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes, runs_of, side_by_side


class PackPart(NamedTuple):
    """Members of a pack, or a rank's shards of them, that live side by side: the bytes of all, where they begin among
    those of the pack, and by number, which elements of this part each member is. `cut` makes the members of memory
    with all of this part, if they are whole."""

    bytes: StoredBytes
    start: int
    members: dict[int, range]
    cut: CachedViews

    def slots(self, starts: Sequence[int]) -> list[tuple[range, int]]:
        """Elements of this part, and where they belong in memory in which the members begin at `starts`: as few
        ranges as possible."""
        found: list[tuple[range, int]] = []
        for number, own in self.members.items():
            if found and found[-1][0].stop == own.start and found[-1][1] + len(found[-1][0]) == starts[number]:
                found[-1] = range(found[-1][0].start, own.stop), found[-1][1]
            else:
                found.append((own, starts[number]))
        return found


class Pack:
    """The storages of a pack's parameters, in the place of one. It doesn't keep them alive.

    As a rule they live side by side, and all are one part.

    Attributes:
        key: that no storage and no other pack has.
        order: of the members, by number: as their parameters were made.
        tiers, device, ranks: those of the first.
        partitioned: whether each rank has its shard of the members alone.
        in_place: whether the members are, as of a storage.
    """

    has_plain_gradient = False  # what leaves nothing behind that moves is in no pack

    def __init__(self, storages: Sequence[TensorStorage], planned: Tile) -> None:
        """Raises: RanksError for parameters that different ranks train."""
        if len({storage.share.ranks for storage in storages}) > 1:
            raise RanksError(
                f"{planned.label} move together, and different process groups train them: offload them with pack=None"
            )
        self.key = new_key()
        self.tiers, self.device = storages[0].tiers, storages[0].device
        self.ranks, self.partitioned = storages[0].share.ranks, storages[0].share.partitioned
        self._every_tiers = {storage.tiers for storage in storages}
        self._storages = [weakref.ref(storage) for storage in storages]
        self.order = sorted(range(len(storages)), key=lambda number: storages[number].key)
        self._keys = frozenset(storage.key for storage in storages)
        self.in_place = all(storage.in_place for storage in storages)
        self.parts = list(_parts([storage.bytes for storage in storages], planned))

    @classmethod
    def of(cls, storages: Sequence[TensorStorage], planned: Tile) -> Pack:
        """The pack of these storages, the same whenever it is asked for."""
        known = _PACKS.setdefault(storages[0], [])
        for pack in known:
            if pack.is_of(storages):
                return pack
        known[:] = [pack for pack in known if None not in pack.members]
        known.append(pack := cls(storages, planned))
        return pack

    @property
    def members(self) -> list[TensorStorage]:
        """The storages. Their model is alive while one of its graphs runs."""
        return [storage() for storage in self._storages]

    def is_of(self, storages: Sequence[TensorStorage]) -> bool:
        """Whether these are its storages."""
        return len(self._storages) == len(storages) and all(
            one() is other for one, other in zip(self._storages, storages, strict=True)
        )

    @property
    def version(self) -> int:
        """How often anything was written where they live."""
        return sum(part.bytes.allocation.version for part in self.parts)

    def in_its_place(self, planned: Tile) -> list[torch.Tensor]:
        """As that of a storage, of each member."""
        return [one.part(0, member.shape) for one, member in zip(self.members, planned.members, strict=True)]

    def settled(self) -> None:
        """Return once nothing that goes on in the background is about to change the parts."""
        for tiers in self._every_tiers:
            tiers.check_process()
            if (background := tiers.background) is not None:
                background.settle(self._keys)
        for storage in self.members if self.ranks.shards > 1 else ():
            storage.share.settle()

    def begin_refresh(self, name: str) -> list[Refresh | PackRefresh]:
        """As that of a storage, for all members in one collective. `name`: for errors."""
        if self.ranks.shards == 1 or self.partitioned:
            return []
        members = self.members
        stale = [storage for storage in members if storage.share.stale]
        if stale:
            for storage in stale:
                storage.share.stale = False
            with RECORDER.about(kinds=REFRESH):
                refresh = PackRefresh([(storage.share, storage.bytes.in_memory) for storage in stale], name)
            for storage in stale:
                storage.share.refreshing = refresh
        return list(dict.fromkeys(one.share.refreshing for one in members if one.share.refreshing is not None))


def shard_starts(planned: Tile) -> list[int]:
    """Where the members' shards begin in a rank's shard of a pack."""
    return list(accumulate((member.shard for member in planned.members), initial=0))


def _parts(held: Sequence[StoredBytes], planned: Tile) -> Iterator[PackPart]:
    """In the order in which the members live, which may be another one than that in the plan."""
    start = 0
    for run in runs_of(held):
        together = side_by_side([held[number] for number in run])
        begins = {number: held[number].first - together.first for number in run}
        members = {number: range(begin, begin + held[number].count) for number, begin in begins.items()}
        cut = CachedViews(
            [slice(own.start, own.stop) for own in members.values()], [planned.members[n].shape for n in run]
        )
        yield PackPart(together, start, members, cut)
        start += spaced(together.count, planned.dtype)


_PACKS: weakref.WeakKeyDictionary[TensorStorage, list[Pack]] = weakref.WeakKeyDictionary()
"""By the first storage, the packs that graphs run with."""

Stored = TensorStorage | Pack
"""What a tile is of: one parameter or activation, or several parameters."""
