"""The static schedule: while operator i computes, the all-gather of i+1, upload of i+2 and fetch of i+3 are under way.

ZeRO-Infinity, section 6.2, with the operator sequence known beforehand instead of traced on the fly. In backward,
the reduce-scatter of an operator's gradients overlaps the next operator and their offload the one after.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.framework import OPERATOR, GraphContext, is_compute, nodes_calling, operator_of
from zinf_fx.plan.schedule import HEAD, Tile


@dataclass(frozen=True)
class HeadTransfer:
    """A transfer that a graph needs before it begins: `operators_early` operators before its first."""

    op: object
    token: str
    operators_early: int


@dataclass(frozen=True)
class Prefetch:
    """Move every transfer as many operators ahead of its use as `distances` and the byte budget allow.

    Attributes:
        distances: operators between use and the start of (all-gather, upload, fetch).
        budget: bytes of tiles that may be in flight or in use at once; None: no limit. Where prefetching would
            exceed it, a tile starts later. PlanError when even the tiles in use exceed it.
        successor_head: what the next graph needs at its head; this graph starts it in its last operators.
    """

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[tuple[str, ...]] = ("lowered",)
    provides: ClassVar[tuple[str, ...]] = ("prefetched",)
    changes_numerics: ClassVar[bool] = False

    distances: tuple[int, int, int] | None = (1, 2, 3)
    budget: int | None = None
    successor_head: tuple[HeadTransfer, ...] = field(default=())

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        distance_of = dict(zip((ops.allgather, ops.upload, ops.fetch), self.distances or (0, 0, 0), strict=True))
        transfers = list(nodes_calling(graph, *ops.TRANSFERS))
        starts = self._operator_starts(graph)
        earliest = _earliest_starts(graph, context, distance_of[ops.fetch], self.budget)
        # What starts first stands first: the head before operator 0, which may begin at the same node. Among those of
        # one operator the nearer use stands first, because the disk serves requests in order.
        moved = []
        for node in transfers:
            use = operator_of(node)
            moved.append((max(use - distance_of[node.target], earliest[context.tile_of(node)], HEAD), use, node))
        for operator, _, node in sorted(moved, key=lambda m: m[:2]):
            node.meta[OPERATOR] = operator
            starts[operator].prepend(node)
        if self.distances is None:
            return
        self._delay_offloads(graph, starts)
        for transfer in self.successor_head:
            operator = len(starts) - 1 - transfer.operators_early
            if operator >= 0:
                token = next(n for n in graph.find_nodes(op="placeholder") if n.name == transfer.token)
                with graph.inserting_before(starts[operator]):
                    node = graph.call_function(transfer.op, (token,), {"turn": True})
                node.meta[OPERATOR] = operator

    def head(self, graph: fx.Graph, context: GraphContext) -> tuple[HeadTransfer, ...]:
        """What a scheduled graph needs at its head, for the `successor_head` of the graph before it."""
        distance_of = dict(zip((ops.allgather, ops.upload, ops.fetch), self.distances or (0, 0, 0), strict=True))
        use = {node.args[0]: operator_of(node) for node in nodes_calling(graph, ops.wait)}
        return tuple(
            HeadTransfer(node.target, node.args[0].name, distance_of[node.target] - use[node.args[0]])
            for node in nodes_calling(graph, *ops.TRANSFERS)
            if operator_of(node) == HEAD
        )

    def _operator_starts(self, graph: fx.Graph) -> dict[int, fx.Node]:
        """The node before which each operator's transfers are inserted; HEAD: before everything."""
        starts: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "output") or node.target in ops.TRANSFERS:
                continue
            starts.setdefault(HEAD, node)
            starts.setdefault(operator_of(node), node)
        output = next(iter(graph.find_nodes(op="output")))
        starts.setdefault(HEAD, output)
        return starts

    def _delay_offloads(self, graph: fx.Graph, starts: dict[int, fx.Node]) -> None:
        """While operator i computes, gradients of i-1 are reduce-scattered and those of i-2 offloaded."""
        last = max(starts)
        for node in nodes_calling(graph, ops.offload):
            operator = operator_of(node) + 2
            if operator <= last:
                node.meta[OPERATOR] = operator
                starts[operator].prepend(node)
            else:
                node.meta[OPERATOR] = last
                next(iter(graph.find_nodes(op="output"))).prepend(node)


def _earliest_starts(graph: fx.Graph, context: GraphContext, distance: int, budget: int | None) -> dict[Tile, int]:
    """The first operator in which each tile's transfers may start, so that bytes in flight stay within `budget`."""
    use = {context.tile_of(node): operator_of(node) for node in nodes_calling(graph, ops.wait)}
    release = {context.tile_of(node): operator_of(node) for node in nodes_calling(graph, ops.release)}
    earliest = {tile: max(first - distance, HEAD) for tile, first in use.items()}
    if budget is None:
        return earliest
    count = 1 + max((operator_of(node) for node in graph.nodes if is_compute(node)), default=0)
    live = [0] * (count + 1)  # index -1 is HEAD, which Python's indexing puts last
    for tile, first in use.items():
        for operator in range(first, release[tile] + 1):
            live[operator] += tile.nbytes
    for operator, total in enumerate(live[:-1]):
        if total > budget:
            held = sorted((t for t in use if use[t] <= operator <= release[t]), key=lambda t: -t.nbytes)
            largest = ", ".join(f"'{t.name}' ({t.nbytes} bytes)" for t in held[:3])
            raise PlanError(
                f"the {context.kind} graph needs {total} bytes of tiles at once in operator {operator}, and the budget "
                f"is {budget}: raise device_memory or host_memory. Largest tiles: {largest}"
            )
    for tile in sorted(use, key=lambda t: (use[t], t.index)):
        start = use[tile]
        while start > earliest[tile] and live[start - 1] + tile.nbytes <= budget:
            start -= 1
            live[start] += tile.nbytes
        earliest[tile] = start
    return earliest
