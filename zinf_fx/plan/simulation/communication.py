"""Count the bytes that a rank sends in a step: it all-gathers parameters, and reduces gradients (ZeRO, section 7).

Collectives are rings: a rank sends a shard to each of the other ranks in an all-gather or a reduce-scatter, and two in
an all-reduce. With Psi bytes of parameters, a step of data parallelism and of ZeRO's stages 1 and 2 sends
2 Psi (N - 1) / N, and one of stage 3 sends 3 Psi (N - 1) / N, less what stays gathered from forward to backward. In R
groups of S ranks, these are the figures for S ranks, and an all-reduce of a shard over the groups adds
2 Psi / S (R - 1) / R. Activations that are divided over the ranks of tensor parallelism are all-gathered once (ZeRO,
section 8).
"""

from __future__ import annotations

from dataclasses import dataclass

from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphKind, Tile


@dataclass(frozen=True)
class Sent:
    """The bytes of parameters, gradients and activations that a rank sends while a graph runs."""

    graph: GraphKind
    parameters: int
    gradients: int
    activations: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of all three."""
        return self.parameters + self.gradients + self.activations


def communication(plan: Plan) -> list[Sent]:
    """Return what each graph sends in the steady state. The next forward graph gathers what the optimizer updated."""
    refreshing = sum(map(refreshed, refreshed_tiles(plan)))
    sent = []
    for number, graph in enumerate(plan.graphs):
        starts = (
            (next(live_range.events("allgather")), live_range)
            for live_range in plan.lifetimes
            if live_range.moves("allgather")
        )
        tiles = [plan.tiles[live_range.tile] for at, live_range in starts if at.graph == number]
        parameters = sum(all_gathered(tile) for tile in tiles if not tile.activation)
        activations = sum(all_gathered(tile) for tile in tiles if tile.activation)
        if graph.kind == "forward":
            parameters += refreshing
        gradients_here = (gradient for gradient in plan.lifetimes.gradient_offloads if gradient.reduced.graph == number)
        reduced = [plan.tiles[gradient.tile] for gradient in gradients_here]
        gradients = sum(reduced_in_group(plan, tile) + reduced_over_groups(plan, tile) for tile in reduced)
        sent.append(Sent(graph.kind, parameters, gradients, activations))
    return sent


def refreshed_tiles(plan: Plan) -> list[Tile]:
    """Return the tiles that a forward graph gathers because each rank updated only its shard of them: at ZeRO's stages
    1 and 2, all that are trained."""
    return [tile for tile in plan.tiles if tile.gradient_tier is not None] if plan.stage in (1, 2) else []


def refreshed(tile: Tile) -> int:
    """Return the bytes that a rank sends while the tile is refreshed."""
    return (tile.ranks - 1) * tile.shard_nbytes


def all_gathered(tile: Tile) -> int:
    """Return the bytes that a rank sends in an all-gather of the tile: none where every rank has it."""
    return refreshed(tile) if tile.partitioned else 0


def reduced_in_group(plan: Plan, tile: Tile) -> int:
    """Return the bytes of the tile's gradient that a rank sends to the ranks of its own group, each of which gets its
    shard."""
    return (tile.ranks - 1) * _shard_reduced(plan, tile)


def reduced_over_groups(plan: Plan, tile: Tile) -> int:
    """Return the bytes of the tile's gradient that a rank sends to the ranks of other groups with the same shard."""
    return 2 * (tile.replicas - 1) * -(-_shard_reduced(plan, tile) // tile.replicas)


def _shard_reduced(plan: Plan, tile: Tile) -> int:
    """Return the bytes of a rank's shard of the gradient, in the dtype of the reduction."""
    return tile.shard_nbytes // tile.dtype.itemsize * (plan.config.reduce_dtype or tile.dtype).itemsize
