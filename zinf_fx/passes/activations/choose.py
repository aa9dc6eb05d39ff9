"""Keep, recompute or offload: the choice for each part of the forward graph that takes the least time within a budget.

Per segment there is a price for recomputing what backward needs of it: the time that computing it took, by the bytes
that are saved. There is a price for bytes that leave: nothing but copies while the disk, or the link, has nothing else
to do, and the time of the transfers from then on. What costs least per byte goes first, until what is left fits: the
solution of the knapsack problem's linear relaxation, which is off by one item at most.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
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
    parts: Sequence[PricedSegment], room: int, rates: Rates, idle: float, and_last: bool
) -> tuple[set[int], set[fx.Node]]:
    """Which parts are recomputed, and which memory leaves, until at most `room` bytes stay, or no more can go.

    `idle`: seconds of a step in which the way to the tier has nothing else to do. The last part is not recomputed,
    which backward would do at once, but for `and_last`: where it does for one micro-batch at a time.
    """
    staying = _Staying(parts)
    recomputable = parts if and_last else parts[:-1]
    prices = {n: part.seconds / part.nbytes for n, part in enumerate(recomputable) if part.nbytes}
    by_price = sorted(prices, key=prices.__getitem__, reverse=True)
    transfer = 1 / rates.read + 1 / rates.write
    copying = 2 * 2 / rates.memory if rates.unified else 0.0  # out and in, each read and written
    while staying.needed > room:
        movable = staying.movable()
        moving = math.inf if movable is None else copying + (0.0 if staying.gone * transfer < idle else transfer)
        again = prices[by_price[-1]] if by_price else math.inf
        if moving == again == math.inf:
            break
        if movable is not None and moving <= again:
            staying.leave(movable)
        else:
            staying.recompute(by_price.pop())
    return staying.recomputed, staying.leaving


class _Staying:
    """What stays on the device, as one part after the other is recomputed, and memory leaves.

    Attributes:
        recomputed, leaving: as `cheapest` returns them.
        gone: bytes of what leaves.
    """

    def __init__(self, parts: Sequence[PricedSegment]) -> None:
        self.recomputed: set[int] = set()
        self.leaving: set[fx.Node] = set()
        self.gone = 0
        self._parts = parts
        self._sizes: dict[fx.Node, int] = {}
        self._uses: Counter[fx.Node] = Counter()  # in how many parts a node is there
        self._held = 0  # bytes that are there, those that leave among them
        self._largest_part = 0  # of those recomputed
        self._by_size: list[tuple[int, int, fx.Node]] = []  # a heap of what left: the largest first
        # Of each part, what may leave, in order; no part before `_first` has anything.
        self._movable = [deque(part.saved) for part in parts]
        self._first = 0
        for part in parts:
            self._add(part.saved)

    @property
    def needed(self) -> int:
        """Bytes of what stays, of the largest part that is computed again, and of what comes back together."""
        while self._by_size and self._by_size[0][-1] not in self.leaving:
            heappop(self._by_size)
        coming = -self._by_size[0][0] if self._by_size else 0
        return self._held - self.gone + self._largest_part + _TOGETHER * coming

    def movable(self) -> fx.Node | None:
        """What leaves next: what was computed first is needed last, and has the most time to leave and come back."""
        while self._first < len(self._movable):
            nodes = self._movable[self._first]
            while nodes and (nodes[0] in self.leaving or self._sizes[nodes[0]] < SMALLEST):
                nodes.popleft()
            if nodes:
                return nodes[0]
            self._first += 1
        return None

    def leave(self, node: fx.Node) -> None:
        """Let it leave."""
        self.leaving.add(node)
        self.gone += self._sizes[node]
        heappush(self._by_size, (-self._sizes[node], id(node), node))

    def recompute(self, number: int) -> None:
        """Let the checkpoint of this part stay alone."""
        part = self._parts[number]
        self.recomputed.add(number)
        self._largest_part = max(self._largest_part, part.nbytes)
        self._add(part.checkpoint)  # first, as it may have something of what is saved
        for node in part.saved:
            self._uses[node] -= 1
            if not self._uses[node]:
                self._held -= self._sizes[node]
                if node in self.leaving:
                    self.leaving.remove(node)
                    self.gone -= self._sizes[node]
        self._movable[number] = deque(part.checkpoint)
        self._first = min(self._first, number)

    def _add(self, nodes: dict[fx.Node, int]) -> None:
        for node, nbytes in nodes.items():
            self._sizes[node] = nbytes
            self._held += 0 if self._uses[node] else nbytes
            self._uses[node] += 1


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
