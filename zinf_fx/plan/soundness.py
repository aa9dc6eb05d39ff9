"""Whether a plan that was read from a file is one that could have been made: every index leads somewhere, every tile's
journey is in order, and no buffers overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from zinf_fx.config import LARGEST
from zinf_fx.errors import PlanError
from zinf_fx.plan.buffers_spec import check_buffers
from zinf_fx.plan.plan import Choice, Fingerprint, Plan
from zinf_fx.plan.schedule import HEAD, Event, GraphSchedule, Tile

_GRAPHS = (("forward", "backward"), ("inference",))
_JOURNEY = ("fetch", "upload", "allgather", "wait", "release")
_TRANSFERS = _JOURNEY[:3]
# The events that take buffers, and so have an offset.
_WITH_OFFSET = ("fetch", "upload", "offload", "offload_activation")
_MOST_DIMENSIONS = 64


def check_sound(plan: Plan) -> None:
    """Raises: PlanError naming what is wrong, and where."""
    kinds = tuple(graph.kind for graph in plan.graphs)
    if kinds not in _GRAPHS:
        raise PlanError(f"graphs are {list(kinds)}, and must be forward and backward, or inference")
    if plan.world_size < 1:
        raise PlanError(f"world_size is {plan.world_size}")
    for name in ("gradient_buffer", "activation_buffer", "kept"):
        _check_not_negative(name, getattr(plan, name))
    for name in ("host", "device", "chunks", "chunk_elements"):
        _check_not_negative(f"regions.{name}", getattr(plan.regions, name))
    if plan.regions.chunk_elements > plan.config.chunk:
        raise PlanError(f"regions.chunk_elements is {plan.regions.chunk_elements}, more than a chunk has")
    if plan.tile_limit is not None and plan.tile_limit < 0:
        raise PlanError(f"tile_limit is {plan.tile_limit}")
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
    _check_turn(plan)
    check_buffers(plan)


def _check_not_negative(name: str, value: int) -> None:
    if value < 0:
        raise PlanError(f"{name} is {value}, less than 0")


def _check_choices(choices: Sequence[Choice]) -> None:
    for number, choice in enumerate(choices):
        if not 0 <= choice.first < choice.end:
            raise PlanError(f"choices[{number}] is for nodes {choice.first} to {choice.end}, which are none")
        if choice.segment is not None and choice.segment < 0:
            raise PlanError(f"choices[{number}] is of segment {choice.segment}")
    for number, (one, other) in enumerate(pairwise(choices)):
        if other.first < one.end:
            raise PlanError(f"choices[{number}] and choices[{number + 1}] are for the same nodes, or out of order")


def _check_fingerprint(fingerprint: Fingerprint) -> None:
    for node, line in enumerate(fingerprint.nodes):
        if not 0 <= line < len(fingerprint.lines):
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
        for name in ("nodes", "flops", "product_bytes", "other_bytes"):
            _check_not_negative(f"operators[{number}].{name}", getattr(operator, name))
    _check_events(graph)


def _check_tile(number: int, tile: Tile) -> None:
    where = f"tiles[{number}] ('{tile.label[:60]}')"
    if tile.index != number:
        raise PlanError(f"{where} has the index {tile.index}")
    if len(tile.shape) > _MOST_DIMENSIONS:
        raise PlanError(f"{where} has {len(tile.shape)} dimensions")
    nbytes = tile.dtype.itemsize
    for size in tile.shape:
        _check_not_negative(f"a size of {where}", size)
        nbytes *= size
        if nbytes > LARGEST:
            raise PlanError(f"{where} has more bytes than any memory")
    if (
        tile.ranks < 1
        or tile.replicas < 1
        or tile.segment < 0
        or tile.shard < 0
        or tile.ranks * tile.shard * tile.dtype.itemsize > LARGEST
    ):
        raise PlanError(f"{where} has {tile.replicas} times {tile.ranks} shards of {tile.shard} elements")
    if tile.ranks > 1 and tile.ranks * tile.shard * tile.dtype.itemsize < nbytes:
        raise PlanError(f"{where} has more elements than its {tile.ranks} shards of {tile.shard} together")
    if tile.rows is not None:
        first, end = tile.rows
        if not 0 <= first < end or not tile.shape or end - first != tile.shape[0]:
            raise PlanError(f"{where} has the rows {first} to {end}, and the shape {list(tile.shape)}")
        if end * (nbytes // max(tile.shape[0], 1)) > LARGEST:
            raise PlanError(f"{where} begins behind the end of any memory")


def _check_events(graph: GraphSchedule) -> None:
    """In the order of operators; of each tile the journey is run through, step by step, and so is each gradient's."""
    last = HEAD
    step: dict[int, int] = {}  # by tile, the step of its journey that is next
    turn: dict[int, int] = {}
    reduced: Counter[int] = Counter()  # several uses of a divided parameter give a gradient of its tile each
    for number, event in enumerate(graph.events):
        where = f"events[{number}] ({event.kind})"
        if not 0 <= event.tile < len(graph.tiles):
            raise PlanError(f"{where} is of tile {event.tile}, and there are {len(graph.tiles)}")
        if not last <= event.operator < max(len(graph.operators), 1):
            raise PlanError(f"{where} is in operator {event.operator}, after {last} and of {len(graph.operators)}")
        last = event.operator
        where += f" of '{graph.tiles[event.tile].label[:60]}'"
        _check_marks(graph, event, where)
        if event.kind in _JOURNEY:
            steps = turn if event.turn else step
            due = steps.get(event.tile, 0)
            if event.kind != _JOURNEY[due]:
                raise PlanError(f"{where} comes where {_JOURNEY[due]} is due")
            steps[event.tile] = (due + 1) % len(_JOURNEY)
        elif event.kind == "reduce_scatter":
            if reduced[event.tile] and graph.tiles[event.tile].rows is None:
                raise PlanError(f"{where} comes a second time")
            reduced[event.tile] += 1
        elif event.kind == "offload":
            if not reduced[event.tile]:
                raise PlanError(f"{where} comes before its reduce_scatter")
            reduced[event.tile] -= 1
    for tile, due in step.items():
        if due:
            raise PlanError(f"the journey of '{graph.tiles[tile].label[:60]}' ends before its {_JOURNEY[due]}")
    for tile in +reduced:
        raise PlanError(f"the gradient of '{graph.tiles[tile].label[:60]}' is never offloaded")


def _check_marks(graph: GraphSchedule, event: Event, where: str) -> None:
    if event.turn and (graph.kind != "forward" or event.kind not in _TRANSFERS):
        raise PlanError(f"{where} is marked as one of the turn")
    if event.resident and event.kind not in (*_TRANSFERS, "release"):
        raise PlanError(f"{where} is marked as resident")
    if event.offset is not None:
        if event.kind not in _WITH_OFFSET:
            raise PlanError(f"{where} has an offset, and takes no buffer")
        _check_not_negative(f"the offset of {where}", event.offset)
    if event.kind == "offload_activation" and not (graph.kind == "forward" and graph.tiles[event.tile].activation):
        raise PlanError(f"{where} is of no activation of a forward graph")


def _check_turn(plan: Plan) -> None:
    """What forward starts for backward, backward uses."""
    if len(plan.graphs) < 2:
        return
    forward, backward = plan.graphs
    used = {backward.tiles[event.tile].label for event in backward.events if event.kind == "fetch"}
    for event in forward.events:
        label = forward.tiles[event.tile].label
        if event.turn and label not in used:
            raise PlanError(f"the forward graph fetches '{label[:60]}' for backward, which doesn't use it")
