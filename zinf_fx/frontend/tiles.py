"""The tiles of a captured graph: those of its inputs that are gathered."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import fx
from torch.distributed.tensor import DTensor

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.errors import PlanError
from zinf_fx.frontend.each_placement import placed
from zinf_fx.frontend.graph_inputs import GraphInput, origin_of
from zinf_fx.passes.ir.framework import nodes_calling
from zinf_fx.placement import Placement, PlacementRules
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.sharding import Groups, Owners, shards_of
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


def tiles_of(
    graph: fx.Graph, inputs: Sequence[GraphInput], groups: Groups, placement: Placement | PlacementRules | None
) -> tuple[dict[str, Tile], tuple[str, ...], dict[str, Hashable]]:
    """The tiles of a graph by the name of their token's placeholder; these names in the order in which the parameters
    were made; and by name, how each is treated: see `GraphContext`. `placement`: in the place of their own."""
    gathered = {node.args[0].name for node in nodes_calling(graph, ops.gather, ops.write)}
    tiles: dict[str, Tile] = {}
    keys: dict[str, int] = {}
    treatments: dict[str, Hashable] = {}
    numbers: dict[Ranks, int] = {}  # which are the same on every rank
    ranks = groups.shards
    for token in graph.find_nodes(op="placeholder"):
        if token.name not in gathered:
            continue
        origin = origin_of(token.meta["desc"].base)
        tensor = inputs[origin.index].taken
        for attribute in origin.attributes:
            tensor = getattr(tensor, attribute)
        if not isinstance(tensor, StoredTensor):
            raise PlanError(f"'{token}' is gathered, but input {origin} of the captured graph is {tensor!r}")
        base = tensor.base
        keys[token.name] = tensor.storage.key
        # Hooks on a gradient are autograd's to run: such a gradient stays an output.
        moves = tensor.is_leaf and tensor.requires_grad and not tensor.views and not tensor.has_gradient_hooks
        name = inputs[origin.index].name
        if not isinstance(inputs[origin.index].taken, (StoredTensor, DTensor)):  # several tensors make one parameter
            name = ".".join((name, *origin.attributes))
        asked = None if placement is None else placement.of(name, tensor)
        config = placed(base.config, asked)
        known = tensor.storage.stands_for or tensor.storage
        trained_by = numbers.setdefault(known.share.ranks, len(numbers))
        treatments[token.name] = (_treated(placed(known.config, asked)), trained_by)
        owner = Owners(config, ranks).next(0)  # whichever: a plan is the same for all
        shards = shards_of(base.shape, base.dtype, ranks, config, owner) if ranks > 1 else None
        tiles[token.name] = Tile(
            name=name,
            shape=tuple(base.shape),
            dtype=base.dtype,
            tier=base.tier if asked is None else asked.parameters,
            gradient_tier=config.placement.gradients if moves else None,
            state_tier=config.placement.optimizer if moves else None,
            state_dtype=(tensor.storage.gradient.state_dtype or known.gradient.state_dtype) if moves else None,
            master_dtype=(tensor.storage.gradient.master_dtype or known.gradient.master_dtype) if moves else None,
            ranks=ranks,
            shard=shards.size if shards else 0,
            partitioned=ranks > 1 and config.placement.stage == 3,
            replicas=groups.replicas,
            segment=shards.segment if shards and len(shards.segments) > 1 else 0,
            owned=ranks > 1 and owner is not None,
        )
    return tiles, tuple(sorted(keys, key=keys.__getitem__)), treatments


def _treated(config: Config) -> Hashable:
    """The options that say what becomes of a parameter's gradients and states, besides what its tile says."""
    return config.stage, config.gradient_reduction, config.reduce_dtype


def gradient_positions(joint: fx.Graph, tiles: dict[str, Tile], num_fwd_outputs: int) -> dict[int, str]:
    """Of a joint graph's gradients, by position, those of tiles that have a tier for them: the name of the tile's
    placeholder."""
    (output,) = joint.find_nodes(op="output")
    descriptors = output.meta["desc"][num_fwd_outputs:]
    position_of = {origin_of(descriptor): position for position, descriptor in enumerate(descriptors)}
    positions = {}
    for node in joint.find_nodes(op="placeholder"):
        if node.name in tiles and tiles[node.name].gradient_tier:
            position = position_of.get(origin_of(node.meta["desc"].base))
            if position is not None:  # autograd finds no gradient for a weight that is used detached
                positions[position] = node.name
    return positions
