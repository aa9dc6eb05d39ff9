"""What a plan costs: bytes that move per step, and bytes that are in flight while each operator computes.

Predicted from the plan alone, for one rank. A tile of the NVMe tier is in host memory from its fetch to its upload, and
a tile of a slower tier than the device is on the device from its upload to its release. A gradient that leaves is on
the device from its reduce-scatter to its offload. What is saved for backward and stays is `Plan.kept`, and what is
there throughout, unmoved by any event, `Plan.unmoved`. On the CPU the two memories are one, and their sum is what is
used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from operator import add

from zinf_fx.plan.intervals import merged, sums
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE, Event, GraphSchedule, Tile
from zinf_fx.plan.update import costs_of
from zinf_fx.sizes import PAGE, blocks

# Gradients that are offloaded to NVMe, whose buffers are there when another one is offloaded.
PREFETCHED_GRADIENTS = 3


@dataclass(frozen=True)
class Flow:
    """One operator's bytes: what starts to be read from NVMe, and what is in flight in each memory."""

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


def phases(plan: Plan) -> Iterator[tuple[str, Traffic]]:
    """The traffic of each graph and, when the plan trains something, of the optimizer's step."""
    for graph in plan.graphs:
        yield graph.kind, traffic(plan, graph)
    if costs := costs_of(plan, plan.update):
        read, written = sum(cost.read for cost in costs), sum(cost.written for cost in costs)
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


def offloads_to_nvme(schedule: GraphSchedule) -> list[Event]:
    """Return the events that offload gradients to NVMe, in order."""
    tiles = schedule.tiles
    return [e for e in schedule.events if e.kind == "offload" and tiles[e.tile].gradient_tier == "nvme"]


def prefetched_gradient_buffers(plan: Plan, schedule: GraphSchedule) -> list[int | None]:
    """Return, for each gradient that is offloaded to NVMe, the number of the one after whose offload it has its
    buffer, so that what it is added to is read while operators compute. That is up to PREFETCHED_GRADIENTS before, if
    it and those between take half of the gradients' buffer at most, and beside that one fit it. None: it has its buffer
    from its own offload on."""
    rooms = [gradient_buffer_bytes(schedule.tiles[event.tile], plan.stage) for event in offloads_to_nvme(schedule)]
    after: list[int | None] = []
    for number in range(len(rooms)):
        earlier = range(max(number - PREFETCHED_GRADIENTS, 0), number)
        between = {before: sum(rooms[before + 1 : number + 1]) for before in earlier}
        fits = (at for at in earlier if max(2 * between[at], rooms[at] + between[at]) <= plan.gradient_buffer)
        after.append(next(fits, None))
    return after
