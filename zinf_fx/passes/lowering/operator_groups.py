"""The groups of operators that a micro-batch runs before the next one does."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from torch import fx

from zinf_fx.passes.ir.framework import GraphContext, operator_of
from zinf_fx.passes.ir.tile_values import tile_values
from zinf_fx.passes.ir.values import handed_on

# Where a group ends, so many times the bytes may be handed on as at most of the places where least of their neighbours
# are.
_TOLERANCE = 1.5


def groups_of(graph: fx.Graph, context: GraphContext) -> list[int]:
    """For each operator of a graph of one micro-batch, the number of its group (see `Config.micro_batch_group`).

    What is handed on from one group to the next is there for all micro-batches at once. So with "auto", groups end
    where it is least: between the layers of a transformer or, in backward, where layers are computed again, between
    those that are computed again together.
    """
    count = 1 + max(map(operator_of, graph.nodes), default=0)
    size = context.config.micro_batch_group
    if size != "auto":
        return [operator // size for operator in range(count)]
    return cut_where_least(handed_on(graph, count, set(tile_values(graph))))


def cut_where_least(handed: Sequence[int]) -> list[int]:
    """The group of each operator, of which bytes are `handed` on to later ones: groups end at the least of these, and
    where hardly more are handed on."""
    least = [
        here
        for before, here, after in zip([None, *handed], handed[:-1], handed[1:], strict=False)
        if here <= after and (before is None or here <= before)
    ]
    limit = _TOLERANCE * median(least) if least else 0
    groups = [0]
    for nbytes in handed[:-1]:
        groups.append(groups[-1] + (nbytes <= limit))
    return groups
