"""The invariants of offsets, which are about the graphs of a step together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from zinf_fx.errors import PlanError
from zinf_fx.plan.memory.buffers import PlannedBuffer, device_buffers, host_buffers
from zinf_fx.plan.memory.layout import chunk_buffers_of
from zinf_fx.plan.plan import Plan


class _Place(NamedTuple):
    offset: int
    buffer: PlannedBuffer

    @property
    def end(self) -> int:
        return self.offset + self.buffer.nbytes

    def __str__(self) -> str:
        what = f"the {self.buffer.what} of '{self.buffer.label}'" if self.buffer.label else "the optimizer's chunks"
        return f"{what} ({self.offset} to {self.end})"


def check_buffers(plan: Plan) -> None:
    """Check that every buffer lies in its region, and that no two share bytes which are needed at a time.

    Raises: PlanError naming the buffers.
    """
    chunks, offset = [], 0
    for buffer in chunk_buffers_of(plan):
        chunks.append(_Place(offset, buffer))
        offset += buffer.nbytes
    _check("host", [*chunks, *_places(plan, host_buffers(plan))], plan.regions.host)
    _check("device", _places(plan, device_buffers(plan)), plan.regions.device)


def _places(plan: Plan, buffers: Iterable[PlannedBuffer]) -> list[_Place]:
    places = []
    for buffer in buffers:
        offsets = {plan.graphs[at.graph].events[at.number].offset for at in buffer.takers}
        known = [offset for offset in offsets if offset is not None]
        if len(offsets) != 1 or not known:
            _fail(
                "each buffer has one offset", f"the {buffer.what} of '{buffer.label}' has {sorted(map(str, offsets))}"
            )
        places.append(_Place(known[0], buffer))
    return places


def _check(memory: str, places: Iterable[_Place], nbytes: int) -> None:
    changes: list[tuple[int, bool, _Place]] = []
    end = 0
    for place in places:
        if place.end > nbytes:
            _fail("each buffer lies in its region", f"that in {memory} memory has {nbytes} bytes, and there is {place}")
        end = max(end, place.end)
        for span in place.buffer.spans:
            changes += [(span.start, True, place), (span.stop, False, place)]
    there: list[_Place] = []  # by offset
    for _, comes, place in sorted(changes, key=lambda change: (change[0], change[1])):
        index = bisect_left(there, place.offset, key=lambda placed: placed.offset)
        if not comes:
            del there[index]
            continue
        for neighbour in there[max(index - 1, 0) : index + 1]:
            if neighbour.offset < place.end and place.offset < neighbour.end:
                _fail("no two buffers that are needed at a time share bytes", f"these do: {neighbour}, and {place}")
        there.insert(index, place)
    if end < nbytes:
        _fail(
            "a region ends with its last buffer", f"that in {memory} memory has {nbytes} bytes, and they end at {end}"
        )


def _fail(rule: str, problem: str) -> None:
    raise PlanError(f"the places of buffers: {rule}, but {problem}")
