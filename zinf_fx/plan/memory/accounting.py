"""What a plan costs: bytes that move per step, and bytes that are in flight while each operator computes.

Predicted from the plan alone, for one rank. A tile of the NVMe tier is in host memory from its fetch to its upload, and
a tile of a slower tier than the device is on the device from its upload to its release. A gradient that leaves is on
the device from its reduce-scatter to its offload. What is saved for backward and stays is `Plan.kept`, and what is
there throughout, unmoved by any event, `Plan.unmoved`. On the CPU the two memories are one, and their sum is what is
used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add
from typing import NamedTuple

from zinf_fx.adam import STATE_BYTES
from zinf_fx.plan.chunks import Piece, cut, elements_of_chunk
from zinf_fx.plan.intervals import merged, sums
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE, Event, GraphSchedule, Tile
from zinf_fx.sizes import PAGE, blocks

# Elements of a chunk that the CPU updates at a time: with their states they fit its cache, and PyTorch's overhead for
# an operation is small beside the operation.
AT_A_TIME = 1 << 20
# Elements of a chunk, at most, that the CPU's threads update at the same time, in pieces.
AT_ONCE = 8 * AT_A_TIME
# Gradients that leave for NVMe, of which the room is there when another one has left.
PREFETCHED_GRADIENTS = 3


@dataclass(frozen=True)
class Flow:
    """Of one operator, in bytes: what starts to be read from NVMe, and what is in flight in each memory."""

    operator: int
    fetched: int
    device: int
    host: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that move in one phase of a step, by source and destination."""

    nvme_to_host: int = 0
    host_to_device: int = 0
    device_to_host: int = 0
    host_to_nvme: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, astuple(self), astuple(other)))

    @property
    def nvme(self) -> int:
        """Bytes read from NVMe and written to it."""
        return self.nvme_to_host + self.host_to_nvme


def flows(plan: Plan, graph: GraphSchedule) -> list[Flow]:
    """The flow of each operator, that of the prologue first.

    Transfers are in flight from the operator that starts them on; what an operator releases is still there while it
    computes. Bytes are counted as read once, by the graph that starts to read them.
    """
    lifetimes, number = plan.lifetimes, plan.graphs.index(graph)
    operators = range(PROLOGUE, len(graph.operators))
    read: Counter[int] = Counter()
    for live_range in lifetimes:
        if live_range.begin.graph == number and live_range.moves("fetch"):
            read[live_range.begin.operator] += bytes_read(graph.tiles[live_range.tile])
    on_device: defaultdict[int, list[range]] = defaultdict(list)
    anywhere: defaultdict[int, list[range]] = defaultdict(list)
    for tile, there, uploaded in lifetimes.presences(number):
        on_device[tile].append(range(uploaded, there.stop))
        anywhere[tile].append(there)
    device, host = [], []
    for index, ranges in on_device.items():
        tile, uploaded = graph.tiles[index], merged(ranges)
        if tile.needs_buffer:
            device += [(part, tile.gathered_nbytes) for part in uploaded]
        host += [(part, bytes_read(tile)) for part in merged(anywhere[index])]
        host += [(part, -bytes_read(tile)) for part in uploaded]  # it has left host memory
    for gradient in lifetimes.gradient_offloads:
        tile = graph.tiles[gradient.tile]
        if gradient.reduced.graph == number and tile.gradient_tier != "device":
            last = gradient.offloaded.operator if gradient.offloaded is not None else operators.stop
            device.append((range(gradient.reduced.operator, last + 1), tile.nbytes))
    both = zip(operators, sums(device, operators), sums(host, operators), strict=True)
    return [Flow(operator, read[operator], *in_flight) for operator, *in_flight in both]


def traffic(plan: Plan, graph: GraphSchedule) -> Traffic:
    """What one graph moves."""
    number = plan.graphs.index(graph)
    uploads = [graph.tiles[s.tile] for s in plan.lifetimes if s.graph == number and s.moves("upload")]
    offloads = [graph.tiles[e.tile] for e in graph.events if e.kind == "offload"]
    leaving = [graph.tiles[e.tile] for e in graph.events if e.kind in ("offload_activation", "write")]
    return Traffic(
        nvme_to_host=sum(flow.fetched for flow in flows(plan, graph)),
        host_to_device=sum(t.held_nbytes for t in uploads if t.tier != "device"),
        device_to_host=sum(gradient_copied(plan, t) for t in offloads if t.gradient_tier != "device")
        + sum(t.held_nbytes for t in leaving if t.tier != "device"),
        host_to_nvme=sum(in_blocks(t, t.gradient_nbytes(plan.stage)) for t in offloads if t.gradient_tier == "nvme")
        + sum(bytes_stored(t) for t in leaving if t.tier == "nvme"),
    )


def trained_in(plan: Plan) -> list[Tile]:
    """The parameters, each as one tile, that an optimizer's step follows the plan for."""
    return whole_parameters(tile for tile in plan.tiles if tile.gradient_tier is not None)


def whole_parameters(tiles: Iterable[Tile]) -> list[Tile]:
    """Parameters as one tile each: the optimizer doesn't divide them as the graphs do."""
    found: dict[str, Tile] = {}
    for tile in tiles:
        before = found.setdefault(tile.name, tile)
        if before is not tile and tile.rows:
            shape = (before.shape[0] + tile.shape[0], *tile.shape[1:])
            found[tile.name] = replace(before, shape=shape, shard=before.shard + tile.shard)
    return list(found.values())


def can_be_consumed_in_place(tile: Tile) -> bool:
    """Whether an optimizer that steps in backward can have the tile's gradient as it was computed, where it updates:
    whole, and not reduced over ranks."""
    return tile.rows is None and tile.ranks == 1


@dataclass(frozen=True)
class Chunk:
    """What an optimizer's step updates at a time, in one place, and what a step of Adam does to it on one rank.

    Attributes:
        on_device: whether the device updates it, where its states live.
        elements: that this rank updates.
        states: bytes of states that the arithmetic reads, and writes.
        read, written: bytes from NVMe, and to it.
        gradients: of what is read, the bytes that backward makes; the others are there when the step before is over.
        codes, splits: how many codes of 8 bits become moments and codes again, and how many split masters are joined.
        names: of the tiles' parameters in it, the last of which goes on in the next chunk if it is not among `ends`.
        ends: of those that end with it.
    """

    on_device: bool
    elements: int
    states: int
    read: int
    written: int
    gradients: int
    codes: int
    splits: int
    names: tuple[str, ...]
    ends: tuple[str, ...]

    @property
    def read_early(self) -> int:
        """Of the bytes that are read, those that backward may read for the next step."""
        return self.read - self.gradients


def chunks(plan: Plan, in_backward: bool = False, in_place: bool = False) -> list[Chunk]:
    """An optimizer's step, in the order of first uses: states and gradients are read, states and parameters written. A
    parameter that is its own master, or a part of it, is read too.

    With `in_backward`, it is in the order in which gradients are whole. `in_place`: those that can be are consumed
    where they were computed, and not read.
    """
    size = plan.regions.chunk_elements or elements_of_chunk(plan.config.chunk // STATE_BYTES)
    tiles = _in_order_of_updates(plan, in_backward)
    cuts: list[tuple[bool, tuple[Piece[_Updated], ...]]] = []
    for on_device in (False, True):
        updated = [
            (_Updated(number, tile), [range(elements) for elements in tile.updated_elements(plan.stage)])
            for number, tile in enumerate(tiles)
            if (tile.state_tier == "device") == on_device
        ]
        cuts += [(on_device, pieces) for pieces in cut(updated, size)]
    cuts.sort(key=lambda chunk: chunk[1][0].owner.number)
    return [_chunk(on_device, pieces, in_place) for on_device, pieces in cuts]


class _Updated(NamedTuple):
    """A tile's parameters, and their number in the order of updates."""

    number: int
    tile: Tile


def _in_order_of_updates(plan: Plan, in_backward: bool) -> list[Tile]:
    """What is trained, as `chunks` says."""
    events = (event for graph in plan.graphs for event in graph.events)
    if in_backward:
        offloaded = [plan.tiles[event.tile].name for event in events if event.kind == "offload"]
        place = {name: -number for number, name in enumerate(dict.fromkeys(reversed(offloaded)))}
    else:
        place = {name: n for n, name in enumerate(dict.fromkeys(plan.tiles[event.tile].name for event in events))}
    return sorted(trained_in(plan), key=lambda tile: place.get(tile.name, len(place)))


def _chunk(on_device: bool, pieces: Sequence[Piece[_Updated]], in_place: bool) -> Chunk:
    """Pieces begin and end at whole blocks of the store, so that all chunks together have exactly what the parameters
    have."""
    sums: Counter[str] = Counter()
    for piece in pieces:
        tile, count = piece.owner.tile, piece.count
        value = blocks(count * tile.dtype.itemsize)
        states = [count * nbytes for nbytes in tile.states.bytes_each]
        stored = sum(map(blocks, states)) if tile.state_tier == "nvme" else 0
        is_read = tile.gradient_tier == "nvme" and not (in_place and can_be_consumed_in_place(tile))
        codes, splits = tile.states.recoded
        sums["elements"] += count
        sums["states"] += sum(states)
        sums["gradients"] += value if is_read else 0
        sums["read"] += stored + (value if is_read else 0)
        sums["read"] += value if tile.tier == "nvme" and tile.states.reads_weights else 0
        sums["written"] += stored + (value if tile.tier == "nvme" else 0)
        sums["codes"] += count * codes
        sums["splits"] += count * splits
    names = tuple(dict.fromkeys(piece.owner.tile.name for piece in pieces))
    ends = tuple(piece.owner.tile.name for piece in pieces if piece.last)
    numbers = [sums[name] for name in ("elements", "states", "read", "written", "gradients", "codes", "splits")]
    return Chunk(on_device, *numbers, names, ends)


def phases(plan: Plan) -> Iterator[tuple[str, Traffic]]:
    """The traffic of each graph and, when the plan trains something, of the optimizer's step."""
    for graph in plan.graphs:
        yield graph.kind, traffic(plan, graph)
    if step := chunks(plan):
        read, written = sum(chunk.read for chunk in step), sum(chunk.written for chunk in step)
        yield "optimizer", Traffic(nvme_to_host=read, host_to_nvme=written)


def bytes_read(tile: Tile) -> int:
    """Bytes that a fetch of the tile reads: none for a tile that lives in memory."""
    return bytes_stored(tile) if tile.tier == "nvme" else 0


def bytes_stored(tile: Tile) -> int:
    """Bytes of the blocks that the tile, or this rank's shard of it, lies in: its ends may share them with its
    neighbours."""
    return in_blocks(tile, tile.held_nbytes)


def gradient_copied(plan: Plan, tile: Tile) -> int:
    """Bytes of a gradient that are copied from where it was computed to its tier: those of a pack at once from a device
    with memory of its own, with what lies between them, and one by one within host memory."""
    if not tile.members or plan.has_own_memory:
        return tile.gradient_nbytes(plan.stage)
    return sum(tile.updated_elements(plan.stage if plan.stage >= 2 else 0)) * tile.dtype.itemsize


def in_blocks(tile: Tile, nbytes: int) -> int:
    """Bytes of the blocks that so many bytes of the tile, or of its gradient, lie in."""
    return blocks(tile.start * tile.dtype.itemsize % PAGE + nbytes)


def gradient_buffer_bytes(tile: Tile, stage: int) -> int:
    """Bytes of host memory that a tile's gradient needs on its way to NVMe, in whole blocks of its parameter's."""
    return in_blocks(tile, tile.gradient_nbytes_at_once(stage))


def leaving_for_nvme(schedule: GraphSchedule) -> list[Event]:
    """The events with which gradients leave for NVMe, in order."""
    tiles = schedule.tiles
    return [e for e in schedule.events if e.kind == "offload" and tiles[e.tile].gradient_tier == "nvme"]


def prefetched_gradient_buffers(plan: Plan, schedule: GraphSchedule) -> list[int | None]:
    """Of each gradient that leaves for NVMe, the number of the one behind which it has its room, so that what it is
    added to is read while operators compute. That is up to GRADIENTS_AHEAD before, if it and those between take half of
    the gradients' buffer at most, and beside that one fit it. None: it has its room from when it leaves."""
    rooms = [gradient_buffer_bytes(schedule.tiles[event.tile], plan.stage) for event in leaving_for_nvme(schedule)]
    found: list[int | None] = []
    for number in range(len(rooms)):
        earlier = range(max(number - PREFETCHED_GRADIENTS, 0), number)
        those = {before: sum(rooms[before + 1 : number + 1]) for before in earlier}
        fits = (one for one in earlier if max(2 * those[one], rooms[one] + those[one]) <= plan.gradient_buffer)
        found.append(next(fits, None))
    return found
