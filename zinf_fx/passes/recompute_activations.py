"""Activation checkpointing without touching the model (ZeRO-Infinity, section 3: activation checkpoints).

The forward graph is cut where few bytes cross from one side to the other: between the layers of a transformer, where
only the residual stream does. Backward gets what crosses the cuts, and computes one segment again at a time. The cuts
are those with the least peak: what is saved at all cuts, and one segment as a whole.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx.passes.aliases import is_view, memory_of
from zinf_fx.passes.framework import GraphContext, bytes_computed, is_compute
from zinf_fx.passes.tile_values import tile_values


@dataclass(frozen=True)
class RecomputeActivations:
    """Tag what crosses the cuts as saved, and everything before the last cut as recomputed.

    What follows the last cut is saved, because backward would compute it again at once. Random numbers are saved. A
    decision of the user's `torch.utils.checkpoint` stands.
    """

    name: ClassVar[str] = "recompute_activations"
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ("activations",)
    changes_numerics: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        forward = _forward_nodes(graph, context.backward_outputs)
        crossing = _crossing(forward)
        cuts = _best_cuts(crossing, [0 if is_view(n) else bytes_computed(n) for n in forward])
        saved = set().union(*(crossing[cut] for cut in cuts))
        segment = 0
        for position, node in enumerate(forward):
            if "recompute" not in node.meta:
                source = node.args[0] if node.target is operator.getitem else node
                kept = _is_random(source) or node in saved or segment == len(cuts)
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = segment + 1
            if segment < len(cuts) and position == cuts[segment]:
                segment += 1


def _is_random(node: fx.Node) -> bool:
    """Whether computing the node again would draw other random numbers. Attention without dropout draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    position = names.index("dropout_p") if "dropout_p" in names else len(node.args)
    dropout = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p")
    return "dropout_p" not in names or bool(dropout)


def _forward_nodes(graph: fx.Graph, backward_outputs: int) -> list[fx.Node]:
    """The compute nodes that the outputs of forward depend on, less the values of tiles, in graph order."""
    outputs = next(iter(graph.find_nodes(op="output"))).args[0]
    needed = {n for n in outputs[: len(outputs) - backward_outputs] if isinstance(n, fx.Node)}
    forward = []
    tiles = tile_values(graph)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
            if is_compute(node) and node not in tiles:
                forward.append(node)
    return forward[::-1]


def _crossing(forward: list[fx.Node]) -> list[frozenset[fx.Node]]:
    """For each position, the nodes up to it whose memory a later forward node reads."""
    root = {node: memory_of(node) for node in forward}
    position_of = {node: position for position, node in enumerate(forward)}
    last_use: dict[fx.Node, int] = {}
    for position, node in enumerate(forward):
        for source in node.all_input_nodes:
            last_use[root.get(source, source)] = position
    result, live = [], set()
    leaving: dict[int, list[fx.Node]] = {}
    for node, last in last_use.items():
        leaving.setdefault(last, []).append(node)
    for position, node in enumerate(forward):
        live.difference_update(leaving.get(position, ()))
        if root[node] is node and bytes_computed(node) and last_use.get(node, position) > position:
            live.add(node)
        result.append(frozenset(n for n in live if n in position_of))
    return result


def _best_cuts(crossing: list[frozenset[fx.Node]], sizes: list[int]) -> list[int]:
    """The positions to cut behind: those whose saved bytes and largest segment are least together."""
    bytes_crossing = [sum(map(bytes_computed, nodes)) for nodes in crossing]
    candidates = _local_minima(bytes_crossing)
    total = sum(sizes)
    best, best_peak = [], total
    limit = total // 2
    while limit > 0 and candidates:
        cuts, largest = _cut_by_size(candidates, sizes, limit)
        saved = sum(map(bytes_computed, set().union(*(crossing[cut] for cut in cuts))))
        if saved + largest < best_peak:
            best, best_peak = cuts, saved + largest
        if len(cuts) == len(candidates):
            break
        limit = min(limit - 1, limit * 7 // 8)
    return best


def _cut_by_size(candidates: list[int], sizes: list[int], limit: int) -> tuple[list[int], int]:
    """Cut as late as segments of at most `limit` bytes allow; also the largest segment that results."""
    cuts: list[int] = []
    segment = largest = pending = 0
    previous = None
    at_candidate = set(candidates)
    for position, size in enumerate(sizes):
        segment += size
        pending += size
        if segment > limit and previous is not None:
            cuts.append(previous)
            largest = max(largest, segment - pending)
            segment, previous = pending, None
        if position in at_candidate:
            previous, pending = position, 0
    return cuts, max(largest, segment)


def _local_minima(values: list[int]) -> list[int]:
    """Positions where the value is below its neighbours; of equal neighbours, the first."""
    minima = []
    falling, candidate = True, None
    for position, value in enumerate(values):
        before = values[position - 1] if position else None
        if before is None or value < before:
            falling, candidate = True, position
        elif value > before:
            if falling and candidate is not None and candidate > 0:
                minima.append(candidate)
            falling = False
    return minima
