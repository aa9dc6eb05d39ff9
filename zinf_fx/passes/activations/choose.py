"""Keep, recompute or offload: the choice for each part of the forward graph that takes the least time within a budget.

Per segment there is a price for recomputing what backward needs of it: the time that computing it took, by the bytes
that are saved. There is a price for bytes that leave: nothing but copies while the disk, or the link, has nothing else
to do, and the time of the transfers from then on. What costs least per byte goes first, until what is left fits: the
solution of the knapsack problem's linear relaxation, which is off by one item at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.activations.offload import LEAVES, SMALLEST
from zinf_fx.passes.activations.segments import Segments
from zinf_fx.passes.ir.framework import GraphContext, Pass, bytes_computed, key_of, nodes_calling
from zinf_fx.passes.ir.work import work_of
from zinf_fx.plan.rates import Rates

# Backward computes about twice what forward does.
_BACKWARD = 2
# Of those that leave, an operator of backward may need some together, while the next ones are on their way.
_TOGETHER = 4


@dataclass(frozen=True)
class ChooseActivations(Pass):
    """Tag what is saved and what is recomputed, and mark what of the saved leaves.

    Attributes:
        room: bytes for what is saved and stays on the device, together with one segment that is computed again; None:
            all may stay.
        rates: of this machine.
    """

    name = "choose_activations"
    provides = ("activations",)

    room: int | None
    rates: Rates

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        segments = Segments(graph, context)
        cuts = segments.at_minima()
        parts = priced_segments(segments, cuts, self.rates)
        recomputed: set[int] = set()
        leaving: set[fx.Node] = set()
        if self.room is not None:
            idle = _idle_seconds(graph, context, parts, self.rates)
            recomputed, leaving = cheapest(parts, self.room, self.rates, idle, and_last=context.config.in_groups)
        segments.tag(cuts, recomputed)
        for node in graph.nodes:
            node.meta[LEAVES] = node in leaving
        return context


class PricedSegment(NamedTuple):
    """One segment.

    Attributes:
        saved: bytes of what backward needs of it, by the node that made the memory.
        checkpoint: as well, what it is computed again from.
        seconds: that computing it takes.
    """

    saved: dict[fx.Node, int]
    checkpoint: dict[fx.Node, int]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of what backward needs."""
        return sum(self.saved.values())


def priced_segments(segments: Segments, cuts: Sequence[int], rates: Rates) -> list[PricedSegment]:
    """The segments between `cuts`."""
    entering = [(), *(segments.crossing[cut] for cut in cuts)]
    parts = []
    for nodes, crossing in zip(segments.between(cuts), entering, strict=True):
        saved = {memory: bytes_computed(memory) for memory in segments.needed(nodes)}
        seconds = sum(seconds_of(node, rates) for node in nodes)
        parts.append(PricedSegment(saved, {node: bytes_computed(node) for node in crossing}, seconds))
    return parts


def cheapest(
    parts: Sequence[PricedSegment], room: int, rates: Rates, idle: float, and_last: bool = False
) -> tuple[set[int], set[fx.Node]]:
    """Which parts are recomputed, and which memory leaves, until at most `room` bytes stay, or no more can go.

    `idle`: seconds of a step in which the way to the tier has nothing else to do. The last part is not recomputed,
    which backward would do at once, but for `and_last`: where it does for one micro-batch at a time.
    """
    staying = {number: part.saved for number, part in enumerate(parts)}
    recomputed: set[int] = set()
    leaving: set[fx.Node] = set()
    others = parts if and_last else parts[:-1]
    prices = {n: part.seconds / part.nbytes for n, part in enumerate(others) if part.nbytes}
    by_price = sorted(prices, key=prices.__getitem__, reverse=True)
    transfer = 1 / rates.read + 1 / rates.write
    copying = 2 * 2 / rates.memory if rates.unified else 0.0  # out and in, each read and written
    while True:
        there = {node: nbytes for saved in staying.values() for node, nbytes in saved.items()}
        leaving &= there.keys()
        largest = max((parts[number].nbytes for number in recomputed), default=0)
        gone = sum(there[node] for node in leaving)
        coming = _TOGETHER * max((there[node] for node in leaving), default=0)
        if sum(there.values()) - gone + largest + coming <= room:
            break
        # What was computed first is needed last: it has the most time to leave and to come back.
        movable = next((node for node in there if there[node] >= SMALLEST and node not in leaving), None)
        moving = math.inf if movable is None else copying + (0.0 if gone * transfer < idle else transfer)
        again = prices[by_price[-1]] if by_price else math.inf
        if moving == again == math.inf:
            break
        if moving <= again:
            leaving.add(movable)
        else:
            number = by_price.pop()
            recomputed.add(number)
            staying[number] = parts[number].checkpoint
    return recomputed, leaving


def seconds_of(node: fx.Node, rates: Rates) -> float:
    """An estimate of what a node takes: its arithmetic, or the memory that it reads and writes, whichever is longer."""
    work = work_of(node)
    return max(work.flops / rates.flops, (work.product_bytes + work.other_bytes) / rates.memory)


def _idle_seconds(graph: fx.Graph, context: GraphContext, parts: Sequence[PricedSegment], rates: Rates) -> float:
    """Seconds of forward and backward in which parameters and gradients leave the disk alone."""
    computing = (1 + _BACKWARD) * sum(part.seconds for part in parts)
    tiles = {key_of(node): context.tile_of(node) for node in nodes_calling(graph, ops.gather)}
    fetched = 2 * sum(tile.nbytes for tile in tiles.values() if tile.tier == "nvme")
    written = sum(tile.nbytes for tile in tiles.values() if tile.gradient_tier == "nvme")
    return max(computing - fetched / rates.read - written / rates.write, 0.0)
