"""Activation checkpointing without touching the model (ZeRO-Infinity, section 3: activation checkpoints).

The forward graph is cut where few bytes cross from one side to the other. Backward gets what crosses the cuts, and
computes one segment again at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from zinf_fx.errors import PlanError
from zinf_fx.passes.activations.segments import Segments
from zinf_fx.passes.ir.framework import GraphContext, Pass, bytes_computed


@dataclass(frozen=True)
class RecomputeActivations(Pass):
    """Tag what crosses the cuts as saved, and everything before the last cut as recomputed.

    What follows the last cut is saved, because backward would compute it again at once; but for where backward computes
    it for one micro-batch at a time, and has saved it for all of them.

    Attributes:
        interval: layers between two cuts (ZeRO-Infinity, equation 3: ci); None: the cuts are those with the least peak,
            which is what is saved at all cuts, and what backward needs of one segment.
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
    """The positions to cut after: where what is saved, and what backward needs of one segment, is least together."""
    candidates = segments.at_minima()
    needed = set(segments.needed(segments.forward))
    nbytes = [0, *accumulate(sum(bytes_computed(node) for node in nodes if node in needed) for nodes in segments.made)]
    # Of the bytes that backward needs, where each segment may begin: at the start, or after a candidate.
    begins = [0, *(nbytes[cut + 1] for cut in candidates)]
    return [candidates[number] for number in _least_peak(begins, nbytes[-1], _saved_at(segments, candidates))]


def _saved_at(segments: Segments, candidates: Sequence[int]) -> list[list[int]]:
    """By candidate, and by the number of the segment's begin (0: that of the graph, n + 1: after candidate n), the
    bytes that a cut there saves and the cut at the begin doesn't: what crosses and was computed in between."""
    made_at = {node: position for position, nodes in enumerate(segments.made) for node in nodes}
    saved = []
    for number, cut in enumerate(candidates):
        computed_in = [0] * (number + 1)  # what crosses, by the begin that its computation is the first to follow
        for node in segments.crossing[cut]:
            computed_in[bisect_left(candidates, made_at[node], hi=number)] += bytes_computed(node)
        saved.append(list(accumulate(reversed(computed_in)))[::-1])
    return saved


def _least_peak(begins: Sequence[int], total: int, saved: Sequence[Sequence[int]]) -> list[int]:
    """The candidates' numbers at which cuts have the least peak, or one that is larger by less than a seventh: sizes of
    segments are tried in steps."""
    best, best_peak = [], total
    limit = total - 1
    while limit > 0:
        chosen, peak = _cut_by_size(begins, total, saved, limit)
        if peak < best_peak:
            best, best_peak = chosen, peak
        if len(chosen) == len(saved):
            break
        limit = min(limit - 1, limit * 7 // 8)
    return best


def _cut_by_size(
    begins: Sequence[int], total: int, saved: Sequence[Sequence[int]], limit: int
) -> tuple[list[int], int]:
    """The candidates' numbers at which cuts save least while segments have at most `limit` bytes, if candidates are so
    close; also these bytes and those of the largest segment together."""
    least = [0]  # saved, where a segment begins there
    before = [0]  # at which number the segment before it begins
    low = 0
    for number in range(1, len(begins) + 1):
        end = begins[number] if number < len(begins) else total
        while low < number - 1 and end - begins[low] > limit:
            low += 1
        costs = [
            least[begin] + (saved[number - 1][begin] if number < len(begins) else 0) for begin in range(low, number)
        ]
        least.append(min(costs))
        before.append(low + costs.index(least[-1]))
    chosen, largest, end = [], 0, len(begins)
    while end:
        begin = before[end]
        largest = max(largest, (begins[end] if end < len(begins) else total) - begins[begin])
        if begin:
            chosen.append(begin - 1)
        end = begin
    return chosen[::-1], least[-1] + largest
