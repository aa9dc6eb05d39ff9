"""Gradients that leave for NVMe, one after the other: room for the next one, and what it is to be added to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zinf_fx.plan.memory.accounting import has_room_for_next, room_of_gradient
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.gradients.accumulate import Addends
from zinf_fx.runtime.recorder import GRADIENT, RECORDER
from zinf_fx.runtime.tensor.pack import Stored
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window


class GradientsAhead:
    """Of one run of a backward graph, the gradients that leave for NVMe, in the order of the plan.

    When one has left, there is to be room for the next, if the plan has that (`has_room_for_next`), and elements that
    this is to be added to are read while operators compute.
    """

    def __init__(
        self, plan: Plan, tiles: Sequence[Tile], storages: Sequence[Stored], leaving: Sequence[tuple[int, int | None]]
    ) -> None:
        """`leaving`: their tiles, and the offsets of their buffers; `storages`: of each tile."""
        self._plan, self._tiles, self._storages, self._leaving = plan, tiles, storages, leaving
        self._count = 0  # of those that left
        self._window: Window | DeviceWindow | None = None

    def left(self, addends_of: Callable[[int], Addends | None]) -> None:
        """The next one left. `addends_of`: by a tile, what its gradient is to be added to."""
        self.close()
        before = self._tiles[self._leaving[self._count][0]]
        self._count += 1
        if self._count == len(self._leaving):
            return
        tile, offset = self._leaving[self._count]
        planned = self._tiles[tile]
        if not has_room_for_next(self._plan, before, planned):
            return
        tiers = self._storages[tile].tiers
        tiers.limit_writes(self._plan.gradient_buffer - room_of_gradient(planned, self._plan.stage))
        if tiers.background is None and (addends := addends_of(tile)) is not None:
            with RECORDER.about(planned.label, GRADIENT):
                self._window = addends.bytes.read_ahead(addends.start, addends.count, offset)

    def close(self) -> None:
        """Give back what was read ahead and not used."""
        window, self._window = self._window, None
        if window is not None:
            window.close()
