"""Offsets for transfer buffers: lifetimes are known, so each has its place in one region of its memory beforehand.

So nothing fragments, and what a plan takes of a memory is a number in it. The places are chosen for both graphs of a
step together, because tiles stay from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.framework import GraphContext, nodes_calling
from zinf_fx.plan.layout import with_offsets
from zinf_fx.plan.memory import most, most_on_device
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import MemoryRegions


@dataclass(frozen=True)
class Buffers:
    """Give each transfer that takes a buffer the offset of that.

    Attributes:
        offsets: of the graph's transfers, in their order; None: it takes none.
        regions: that the offsets of all graphs of the plan lie in.
    """

    name: ClassVar[str] = "buffers"
    requires: ClassVar[tuple[str, ...]] = ("residency",)
    provides: ClassVar[tuple[str, ...]] = ("buffers",)
    changes_numerics: ClassVar[bool] = False

    offsets: tuple[int | None, ...]
    regions: MemoryRegions

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        context.regions = self.regions
        for node, offset in zip(nodes_calling(graph, *ops.LOWERED), self.offsets, strict=True):
            if offset is not None:
                node.kwargs = {**node.kwargs, "offset": offset}


def place(plan: Plan) -> list[Buffers]:
    """The pass for each graph of a plan whose events have no offsets yet."""
    planned = with_offsets(plan)
    return [Buffers(tuple(e.offset for e in graph.events), planned.regions) for graph in planned.graphs]


def excess(plan: Plan) -> int:
    """Bytes by which the regions of a plan exceed what its budgets leave; 0 or less: they don't.

    The budget of a device whose memory is host memory is for what is in flight, which the schedule keeps it to.
    """
    over = []
    if plan.config.host_memory is not None:
        over.append(most(plan) - plan.config.host_memory)
    if plan.config.device_memory is not None and plan.regions.device:
        over.append(most_on_device(plan) - plan.config.device_memory)
    return max(over, default=0)
