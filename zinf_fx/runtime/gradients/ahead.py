"""Gradients that leave for NVMe, one after the other: room for those that follow, and what they are to be added to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zinf_fx.plan.memory.accounting import gradient_buffer_bytes, offloads_to_nvme, prefetched_gradient_buffers
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphSchedule
from zinf_fx.runtime.gradients.accumulate import Addends
from zinf_fx.runtime.recorder import GRADIENT, RECORDER
from zinf_fx.runtime.tensor.stored_tile import StoredTile


@dataclass(frozen=True)
class _Room:
    """Of a gradient that is to leave: its tile, where its buffer lies, and how many bytes of gradients may be on their
    way to NVMe when that is taken, as others are planned in the place of these."""

    tile: int
    label: str
    offset: int | None
    limit: int


class RoomsAhead:
    """By the number of a gradient that has left for NVMe, the rooms of others that are there from then on, as planned
    (`prefetched_gradient_buffers`)."""

    def __init__(self, plan: Plan, schedule: GraphSchedule) -> None:
        self._behind: defaultdict[int, list[_Room]] = defaultdict(list)
        leaving = offloads_to_nvme(schedule)
        rooms = [gradient_buffer_bytes(schedule.tiles[event.tile], plan.stage) for event in leaving]
        for number, (event, before) in enumerate(
            zip(leaving, prefetched_gradient_buffers(plan, schedule), strict=True)
        ):
            if before is not None:
                limit = plan.gradient_buffer - sum(rooms[before + 1 : number + 1])
                room = _Room(event.tile, schedule.tiles[event.tile].label, event.offset, limit)
                self._behind[before].append(room)

    def behind(self, number: int) -> Sequence[_Room]:
        """Those that are there when this one has left."""
        return self._behind.get(number, ())


class GradientsAhead:
    """Of one run of a backward graph: what gradients are to be added to is read while operators compute."""

    def __init__(self, rooms: RoomsAhead, storages: Sequence[StoredTile]) -> None:
        """`storages`: of each tile."""
        self._rooms, self._storages = rooms, storages
        self._count = 0  # of gradients that left
        self._read: list[Addends] = []

    def has_left(self, addends_of: Callable[[int], Addends | None]) -> None:
        """The next one left for NVMe. `addends_of`: by a tile, what its gradient is to be added to."""
        for room in self._rooms.behind(self._count):
            tiers = self._storages[room.tile].tiers
            with RECORDER.about(room.label, GRADIENT):
                tiers.limit_writes(room.limit)
                addends = addends_of(room.tile) if tiers.background is None else None
                if addends and addends.stored.read_ahead(addends.start, addends.count, room.offset):
                    self._read.append(addends)
        self._count += 1

    def close(self) -> None:
        """Give back what was read ahead and not used."""
        read, self._read = self._read, []
        for addends in read:
            addends.stored.drop_ahead(addends.start, addends.count)
