"""Small parameters move together: constant-size buffers (ZeRO, section 6.2), the buckets of data parallelism."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.framework import GraphContext, Pass, arguments_of, gathers_in, operand, results_of
from zinf_fx.passes.ir.gradient_parts import gradient_outputs
from zinf_fx.passes.ir.rewriting import emit, set_results
from zinf_fx.plan.packs import in_packs, may_be_packed, nbytes_in_pack, pack_of
from zinf_fx.plan.schedule import Tile


@dataclass(frozen=True)
class PackParameters(Pass):
    """Put small parameters of one kind together in packs of at most `limit` bytes, in the order of their first use. In
    a pack that is divided over ranks, they come in the order in which they were made, in which their shards are read.

    Of one kind are those with the same dtype, device and tier, of which the graph computes gradients for the same tier
    and for states on the same tier, or none, and that the same ranks train with the same options. What is alone stays
    as it is; so does what doesn't move (see `may_be_packed`), or is written to by the graph. A pack is gathered as one
    tile, of which each parameter is a `member`, and its gradients leave together.
    """

    name = "pack"

    limit: int

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        gathers = gathers_in(graph)
        positions = {context.gradients[position]: position for position in gradient_outputs(graph, context)}
        for tokens in self._packs(gathers, context, positions):
            context = _pack(graph, context, {token: gathers[token] for token in tokens}, positions)
        return context

    def _packs(
        self, gathers: Mapping[str, Sequence[fx.Node]], context: GraphContext, differentiated: Collection[str]
    ) -> list[list[str]]:
        """The tokens of each pack."""
        sized = []
        for token, (gather, *_) in gathers.items():
            tile, device = context.tiles[token], arguments_of(gather)[3]
            trained = token in differentiated
            if token not in context.written and may_be_packed(tile, device.type, trained):
                states = (tile.tier, tile.gradient_tier, tile.state_tier, tile.state_dtype, tile.master_dtype)
                kind = (tile.dtype, device, *states, trained, context.treatments.get(token))
                sized.append((token, kind, nbytes_in_pack(tile.numel, tile.dtype, tile.ranks * tile.shard)))
        packs = in_packs(sized, self.limit)
        made = {token: number for number, token in enumerate(context.made) if context.tiles[token].ranks > 1}
        return [sorted(pack, key=lambda token: made.get(token, 0)) for pack in packs]


def _pack(
    graph: fx.Graph, context: GraphContext, gathers: Mapping[str, Sequence[fx.Node]], positions: Mapping[str, int]
) -> GraphContext:
    """Make one pack of the parameters that are gathered so. `positions`: of their gradients among the outputs of
    backward."""
    tokens = [operand(uses[0]) for uses in gathers.values()]
    with graph.inserting_after(max(graph.find_nodes(op="placeholder"))):
        token = emit(tokens[0], ops.pack, tokens)
    pack = pack_of([context.tiles[name] for name in gathers])
    first = min(gather for uses in gathers.values() for gather in uses)  # nodes compare by position
    with graph.inserting_before(first):
        whole = emit(first, ops.gather, token, list(pack.shape), *first.args[2:4])
    for number, (uses, member) in enumerate(zip(gathers.values(), pack.members, strict=True)):
        for gather in uses:  # becomes a member, of the same type
            gather.target, gather.args = ops.member, (whole, gather.args[1])
            gather.kwargs = {"start": member.start, "number": number}
    gradients = {position: name for position, name in context.gradients.items() if name not in gathers}
    if tokens[0].name in positions:
        first = _put_together(graph, context, token, [positions[name] for name in gathers], pack)
        gradients[first] = token.name
    tiles = {name: tile for name, tile in context.tiles.items() if name not in gathers}
    return replace(context, tiles={**tiles, token.name: pack}, gradients=gradients)


def _put_together(graph: fx.Graph, context: GraphContext, token: fx.Node, positions: Sequence[int], pack: Tile) -> int:
    """Make the gradients at these positions one, of the pack with this token. Returns its position, the first."""
    results = results_of(graph)
    first = len(results) - context.backward_outputs
    parts = [results[first + position] for position in positions]
    latest = max(*parts, token)  # nodes compare by position
    with graph.inserting_before(latest.next):
        whole = emit(latest, ops.together, parts, [member.start for member in pack.members], pack.numel)
    whole.meta["partitioner_tag"] = "must_be_in_backward"
    for position in positions:
        results[first + position] = None
    results[first + positions[0]] = whole
    set_results(graph, results)
    return positions[0]
