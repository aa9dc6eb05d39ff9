"""Where each transfer buffer of a plan lies: an offset in one region per memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zinf_fx.plan.memory.lifetimes import Clock, Lifetime, device_buffers, host_buffers
from zinf_fx.plan.memory.packing import pack
from zinf_fx.plan.memory.use import chunks_of, living
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import MemoryRegions

# The graphs during which the optimizer's step may go on.
_STEP_GOES_ON_IN = ("forward",)
# How much smaller its chunks may become, so that it has room to, within a budget.
_SMALLER = (1, 2, 4)


@dataclass(frozen=True)
class Layout:
    """Where the transfer buffers of a plan lie.

    Attributes:
        offsets: of each graph, by the numbers of the events that take a buffer.
        regions: that these lie in.
    """

    offsets: tuple[Mapping[int, int], ...]
    regions: MemoryRegions


def layout_of(plan: Plan) -> Layout:
    """An offset for each event of a plan that takes a buffer, and the regions that they lie in.

    The optimizer's chunks come first. They have room of their own during the graphs in which the step may go on, unless
    the budget has none: then the step ends where a tile needs the room.
    """
    end = Clock(plan).end
    tiles, on_device = host_buffers(plan), device_buffers(plan)
    limit = plan.config.host_memory
    whole = chunks_of(plan).elements
    for elements, graphs in (*((whole // divisor, _STEP_GOES_ON_IN) for divisor in _SMALLER), (whole, ())):
        chunks = chunk_buffers_of(plan, graphs, elements)
        host = pack([*chunks, *tiles], end, bottom=len(chunks))
        if limit is None or living(plan).total + host.nbytes <= limit:
            break
    device = pack(on_device, end)
    placed = [
        *zip(tiles, host.offsets[len(chunks) :], strict=True),
        *zip(on_device, device.offsets, strict=True),
    ]
    offsets: tuple[dict[int, int], ...] = tuple({} for _ in plan.graphs)
    for buffer, offset in placed:
        for at in buffer.takers:
            offsets[at.graph][at.number] = offset
    regions = MemoryRegions(
        host.nbytes, device.nbytes, sum(chunk.nbytes for chunk in chunks), chunks_of(plan, elements).elements
    )
    return Layout(offsets, regions)


def chunk_buffers_of(plan: Plan, graphs: tuple[str, ...] = (), elements: int | None = None) -> list[Lifetime]:
    """The buffers of the optimizer's step, which may go on in `graphs`; they lie one after the other, from 0 on."""
    clock, sizes = Clock(plan), chunks_of(plan, elements)
    on = tuple(span for kind in graphs if (span := clock.of(kind)))
    opened = Lifetime("chunks", "", sizes.opened, (*on, range(clock.step, clock.end)))
    later = Lifetime("chunks", "", sizes.later, (*on, range(clock.step + 1, clock.end)))
    return [chunk for chunk in (opened, later) if chunk.nbytes]
