"""Offsets for transfer buffers: lifetimes are known, so each has its place in one region of its memory beforehand.

So nothing fragments, and what a plan takes of a memory is a number in it. The places are chosen for both graphs of a
step together, because tiles stay from one to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from zinf_fx.passes.ir.framework import GraphContext, Pass, event_of, events_in, set_event
from zinf_fx.plan.memory.layout import layout_of
from zinf_fx.plan.memory.use import peak_device_bytes, peak_host_bytes
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.schedule import MemoryRegions, UpdateSchedule


@dataclass(frozen=True)
class Buffers(Pass):
    """Give each transfer that takes a buffer the offset of that.

    Attributes:
        offsets: by the numbers of the events that take one.
        regions: that the offsets of all graphs of the plan lie in.
        update: the optimizer's step, in the room that it has there.
    """

    name = "buffers"
    requires = ("residency",)

    offsets: Mapping[int, int]
    regions: MemoryRegions
    update: UpdateSchedule

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        for number, node in enumerate(events_in(graph)):
            if number in self.offsets:
                set_event(node, replace(event_of(node), offset=self.offsets[number]))
        return replace(context, regions=self.regions, update=self.update)


def place_buffers(plan: Plan, rates: Rates) -> list[Buffers]:
    """The pass for each graph of a plan whose events have no offsets yet."""
    of_graphs, regions, update = layout_of(plan, rates)
    return [Buffers(offsets, regions, update) for offsets in of_graphs]


def over_budget_by(plan: Plan) -> int:
    """Bytes by which the regions of a plan exceed what its budgets leave; 0 or less: they don't.

    The budget of a device whose memory is host memory is for what is in flight, which the schedule keeps it to.
    """
    over = []
    if plan.config.host_memory is not None:
        over.append(peak_host_bytes(plan) - plan.config.host_memory)
    if plan.config.device_memory is not None and plan.regions.device:
        over.append(peak_device_bytes(plan) - plan.config.device_memory)
    return max(over, default=0)
