"""What a rank sends to others in a step: all-gathers of parameters, and reductions of gradients (ZeRO, section 7).

As a ring sends it: of each all-gather and reduce-scatter, a shard to each of the other ranks; of an all-reduce, two.
With Psi bytes of parameters, a step of data parallelism and of ZeRO's stages 1 and 2 is 2 Psi (N - 1) / N, and one of
stage 3 is 3 Psi (N - 1) / N, less what stays gathered from forward to backward. In R groups of S ranks, these are the
figures for S ranks, and an all-reduce of a shard over the groups adds 2 Psi / S (R - 1) / R.
Activations that are divided over the ranks of tensor parallelism are all-gathered once (ZeRO, section 8).
"""

from __future__ import annotations

from dataclasses import dataclass

from zinf_fx.plan.memory.accounting import tiles_of
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphKind, Tile


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends while a graph runs: of parameters, gradients, and activations."""

    graph: GraphKind
    parameters: int
    gradients: int
    activations: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.activations


def communication(plan: Plan) -> list[Sent]:
    """What each graph sends, in the steady state. What the optimizer updated is gathered by the next forward graph."""
    refreshing = sum(map(refreshed, refreshed_tiles(plan).values()))
    found = []
    for number, graph in enumerate(plan.graphs):
        tiles = _gathers(plan, number)
        parameters = sum(gathered(tile) for tile in tiles if not tile.activation)
        activations = sum(gathered(tile) for tile in tiles if tile.activation)
        if graph.kind == "forward":
            parameters += refreshing
        gradients = [graph.tiles[event.tile] for event in graph.events if event.kind == "reduce_scatter"]
        found.append(Sent(graph.kind, parameters, sum(reduced(plan, tile) for tile in gradients), activations))
    return found


def refreshed_tiles(plan: Plan) -> dict[str, Tile]:
    """By label, the tiles that a forward graph gathers because each rank updated its shard of them only: at ZeRO's
    stages 1 and 2, all that are trained."""
    if plan.stage not in (1, 2):
        return {}
    trained = {label for label, tile in tiles_of(plan).items() if tile.gradient_tier is not None}
    return {
        tile.label: tile
        for graph in plan.graphs
        if graph.kind == "forward"
        for tile in graph.tiles
        if tile.label in trained
    }


def refreshed(tile: Tile) -> int:
    """Bytes that a rank sends while the tile is refreshed."""
    return _to_others(tile)


def gathered(tile: Tile) -> int:
    """Bytes that a rank sends in an all-gather of the tile: none where every rank has it."""
    return _to_others(tile) if tile.partitioned else 0


def reduced(plan: Plan, tile: Tile) -> int:
    """Bytes that a rank sends while the tile's gradient is reduced."""
    return reduced_in_group(plan, tile) + reduced_over_groups(plan, tile)


def reduced_in_group(plan: Plan, tile: Tile) -> int:
    """Bytes of it to ranks of its own group, each of which gets its shard."""
    return (tile.ranks - 1) * _shard_reduced(plan, tile)


def reduced_over_groups(plan: Plan, tile: Tile) -> int:
    """Bytes of it to ranks of other groups, with the same shard."""
    return 2 * (tile.replicas - 1) * -(-_shard_reduced(plan, tile) // tile.replicas)


def _shard_reduced(plan: Plan, tile: Tile) -> int:
    """Bytes of a rank's shard of the gradient while it is reduced."""
    return tile.shard_nbytes // tile.dtype.itemsize * (plan.config.reduce_dtype or tile.dtype).itemsize


def _gathers(plan: Plan, graph: int) -> list[Tile]:
    """The partitioned tiles that a graph starts to gather."""
    tiles = plan.graphs[graph].tiles
    starts = ((next(stay.events("allgather")), stay) for stay in plan.journeys if stay.moves("allgather"))
    return [tiles[stay.tile] for at, stay in starts if at.graph == graph and tiles[stay.tile].partitioned]


def _to_others(tile: Tile) -> int:
    return (tile.ranks - 1) * tile.shard_nbytes
