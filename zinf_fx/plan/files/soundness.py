"""Whether a plan that was read from a file, each field of its type, could have been made: every index leads somewhere,
every tile's lifetime is in order, and no buffers overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest

import torch

from zinf_fx.adam import STATE_BYTES
from zinf_fx.config import LARGEST
from zinf_fx.errors import PlanError
from zinf_fx.plan.memory.spec import check_buffers
from zinf_fx.plan.packs import starts_of
from zinf_fx.plan.plan import Choice, Fingerprint, Plan
from zinf_fx.plan.schedule import CHUNKS, GraphSchedule, Tile
from zinf_fx.plan.spec import check_schedule
from zinf_fx.plan.update import trained_in, update_of
from zinf_fx.sizes import WINDOW_ALIGNMENT

_GRAPHS = (("forward", "backward"), ("inference",))
_MOST_DIMENSIONS = 64


def check_sound(plan: Plan) -> None:
    """Raises: PlanError naming what is wrong, and where."""
    kinds = tuple(graph.kind for graph in plan.graphs)
    if kinds not in _GRAPHS:
        raise PlanError(f"graphs are {list(kinds)}, and must be forward and backward, or inference")
    if plan.regions.chunk_elements > plan.config.chunk // STATE_BYTES:
        raise PlanError(f"regions.chunk_elements is {plan.regions.chunk_elements}, more than `config.chunk` bytes hold")
    if plan.regions.chunk_elements % WINDOW_ALIGNMENT:
        raise PlanError(f"regions.chunk_elements is {plan.regions.chunk_elements}, no multiple of {WINDOW_ALIGNMENT}")
    if plan.regions.chunk_count < CHUNKS:
        raise PlanError(f"regions.chunk_count is {plan.regions.chunk_count}, and {CHUNKS} chunks are there at a time")
    _check_choices(plan.choices)
    if plan.fingerprint is not None:
        _check_fingerprint(plan.fingerprint)
    for graph in plan.graphs:
        parameters = [tile for tile in graph.tiles if not tile.activation]
        if any(tile.ranks * tile.replicas not in (1, plan.world_size) for tile in parameters):
            raise PlanError(f"{graph.kind} graph: a tile is for another number of ranks than {plan.world_size}")
        try:
            _check_graph(graph)
        except PlanError as error:
            raise PlanError(f"{graph.kind} graph: {error}") from None
    check_schedule(plan.graphs)
    for gradient in plan.lifetimes.gradient_offloads:
        if gradient.offloaded is None:
            label = plan.tiles[gradient.tile].label[:60]
            raise PlanError(f"the gradient of '{label}' is never offloaded")
    _check_update(plan)
    check_buffers(plan)


def _check_update(plan: Plan) -> None:
    """Check that the optimizer's step is what the rule makes of the parameters and of the room that there is for it."""
    elements = sum(sum(tile.updated_elements(plan.stage)) for tile in trained_in(plan))
    if elements > len(plan.update.chunks) * max(plan.regions.chunk_elements, 1):
        chunks = f"{len(plan.update.chunks)} chunks of {plan.regions.chunk_elements} elements"
        raise PlanError(f"update has {chunks} for {elements} elements that are trained")
    made = update_of(plan)
    for name in ("chunks", "events"):
        theirs, ours = getattr(plan.update, name), getattr(made, name)
        for number, (read, due) in enumerate(zip_longest(theirs, ours)):
            if read != due:
                raise PlanError(f"update.{name}[{number}] is not what follows of the tiles and of the regions")


def _check_choices(choices: Sequence[Choice]) -> None:
    for number, choice in enumerate(choices):
        if choice.first >= choice.end:
            raise PlanError(f"choices[{number}] is for nodes {choice.first} to {choice.end}, which are none")
    for number, (choice, following) in enumerate(pairwise(choices)):
        if following.first < choice.end:
            raise PlanError(f"choices[{number}] and choices[{number + 1}] are for the same nodes, or out of order")


def _check_fingerprint(fingerprint: Fingerprint) -> None:
    for node, line in enumerate(fingerprint.nodes):
        if line >= len(fingerprint.lines):
            raise PlanError(f"fingerprint.nodes[{node}] is line {line} of {len(fingerprint.lines)}")


def _check_graph(graph: GraphSchedule) -> None:
    labels: set[str] = set()
    for number, tile in enumerate(graph.tiles):
        _check_tile(number, tile)
        if tile.label in labels:
            raise PlanError(f"tiles[{number}] is '{tile.label}', as one before it")
        labels.add(tile.label)
    for number, operator in enumerate(graph.operators):
        if operator.index != number:
            raise PlanError(f"operators[{number}] has the index {operator.index}")
    for number, event in enumerate(graph.events):
        if event.tile >= len(graph.tiles):
            tiles = len(graph.tiles)
            raise PlanError(f"events[{number}] ({event.kind}) is of tile {event.tile}, and there are {tiles}")


def _check_tile(number: int, tile: Tile) -> None:
    where = f"tiles[{number}] ('{tile.label[:60]}')"
    if (tile.gradient_tier is None) != (tile.state_tier is None):
        raise PlanError(f"{where} has its gradient on {tile.gradient_tier}, and states on {tile.state_tier}")
    for option in ("state_dtype", "master_dtype"):
        if getattr(tile, option) is not None and tile.state_tier is None:
            raise PlanError(f"{where} has no states, and {option} {getattr(tile, option)}")
    if tile.master_dtype is not None and tile.dtype != torch.bfloat16:
        raise PlanError(f"{where} is {tile.dtype}, and has a master in {tile.master_dtype}")
    if len(tile.shape) > _MOST_DIMENSIONS:
        raise PlanError(f"{where} has {len(tile.shape)} dimensions")
    nbytes = tile.dtype.itemsize
    for size in tile.shape:
        nbytes *= size
        if nbytes > LARGEST:
            raise PlanError(f"{where} has more bytes than any memory")
    if tile.ranks * tile.shard * tile.dtype.itemsize > LARGEST:
        raise PlanError(f"{where} has {tile.ranks} shards of {tile.shard} elements, more than any memory")
    if tile.ranks > 1 and not tile.members and tile.ranks * tile.shard * tile.dtype.itemsize < nbytes:
        raise PlanError(f"{where} has more elements than its {tile.ranks} shards of {tile.shard} together")
    if tile.members and not _is_pack(tile):
        raise PlanError(f"{where} is no pack of the parameters that it has as members")
    if tile.rows is not None:
        first, end = tile.rows
        if first >= end or not tile.shape or end - first != tile.shape[0]:
            raise PlanError(f"{where} has the rows {first} to {end}, and the shape {list(tile.shape)}")
        if end * (nbytes // max(tile.shape[0], 1)) > LARGEST:
            raise PlanError(f"{where} begins after the end of any memory")


def _is_pack(tile: Tile) -> bool:
    """Whether a tile's members are what it consists of, and its shard their shards."""
    *starts, total = starts_of((member.numel for member in tile.members), tile.dtype)
    if [member.start for member in tile.members] != starts or tile.shape != (total,) or tile.rows or tile.owned:
        return False
    if tile.ranks > 1 and any(tile.ranks * member.shard < member.numel for member in tile.members):
        return False
    return sum(member.shard for member in tile.members) == tile.shard
