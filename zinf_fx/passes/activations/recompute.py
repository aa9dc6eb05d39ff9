"""Activation checkpointing without touching the model (ZeRO-Infinity, section 3: activation checkpoints).

The forward graph is cut where few bytes cross from one side to the other. Backward gets what crosses the cuts, and
computes one segment again at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zinf_fx.errors import PlanError
from zinf_fx.passes.activations.segments import Segments
from zinf_fx.passes.ir.aliases import is_view_node
from zinf_fx.passes.ir.framework import GraphContext, Pass, bytes_computed


@dataclass(frozen=True)
class RecomputeActivations(Pass):
    """Tag what crosses the cuts as saved, and everything before the last cut as recomputed.

    What follows the last cut is saved, because backward would compute it again at once; but for where backward computes
    it for one micro-batch at a time, and has saved it for all of them.

    Attributes:
        interval: layers between two cuts (ZeRO-Infinity, equation 3: ci); None: the cuts are those with the least peak,
            which is what is saved at all cuts, and one segment as a whole.
    """

    name = "recompute_activations"
    provides = ("activations",)

    interval: int | None = None

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        segments = Segments(graph, context)
        if self.interval is None:
            cuts = _best_cuts(segments)
        else:
            cuts = segments.before_layers()[:: self.interval]
            if not cuts:
                raise PlanError(
                    f"activations={self.interval} asks for a checkpoint every {self.interval} layers, and no name of a "
                    "parameter tells of layers, as blocks.3.mlp.up.weight does: use activations='recompute'"
                )
        segments.tag(cuts, range(len(cuts) + context.config.in_groups))
        return context


def _best_cuts(segments: Segments) -> list[int]:
    """The positions to cut behind: those whose saved bytes and largest segment are least together."""
    candidates = segments.at_minima()
    sizes = [0 if is_view_node(node) else bytes_computed(node) for node in segments.forward]
    total = sum(sizes)
    best, best_peak = [], total
    limit = total // 2
    while limit > 0 and candidates:
        cuts, largest = _cut_by_size(candidates, sizes, limit)
        saved = sum(map(bytes_computed, set().union(*(segments.crossing[cut] for cut in cuts))))
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
