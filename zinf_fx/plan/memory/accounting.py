"""What a plan costs: bytes that move per step, and bytes that are in flight while each operator computes.

Predicted from the plan alone, for one rank. A tile of the NVMe tier is in host memory from its fetch to its upload, and
a tile of a slower tier than the device is on the device from its upload to its release. A gradient that leaves is on
the device from its reduce-scatter to its offload. What is saved for backward and stays is `Plan.kept`, and what is
there throughout, unmoved by any event, `Plan.unmoved`. On the CPU the
two memories are one, and their sum is what is used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from zinf_fx.plan.intervals import merged, sums
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import HEAD, GraphSchedule, Tile
from zinf_fx.sizes import PAGE

# Adam keeps two moments of each element and, of a parameter of low precision, a master, in fp32 (ZeRO, section 3.1).
STATE_BYTES = 4
# Chunks of an optimizer's step whose reads are under way while one is updated.
CHUNKS_AHEAD = 1
# Those that the host arena must have room for: opened ahead, updated, being written, and one to spare.
CHUNKS_IN_MEMORY = CHUNKS_AHEAD + 3
# Elements of a chunk that the CPU updates at a time: with their states they fit its cache, and PyTorch's overhead for
# an operation is small beside the operation.
AT_A_TIME = 1 << 20


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
        return Traffic(*(a + b for a, b in zip(self._sizes(), other._sizes(), strict=True)))

    def _sizes(self) -> tuple[int, ...]:
        return (self.nvme_to_host, self.host_to_device, self.device_to_host, self.host_to_nvme)

    @property
    def nvme(self) -> int:
        """Bytes read from NVMe and written to it."""
        return self.nvme_to_host + self.host_to_nvme


def tiles_of(plan: Plan) -> dict[str, Tile]:
    """Every tile of the plan by label; with its gradient's tier where any graph computes a gradient for it."""
    tiles: dict[str, Tile] = {}
    for graph in plan.graphs:
        for tile in graph.tiles:
            gradient_tier = tile.gradient_tier or (tiles[tile.label].gradient_tier if tile.label in tiles else None)
            tiles[tile.label] = replace(tile, gradient_tier=gradient_tier)
    return tiles


def always_kept(plan: Plan) -> frozenset[str]:
    """Labels of the tiles that stay in memory from step to step, and are moved once."""
    journeys, tiles = plan.journeys, plan.graphs[0].tiles
    return frozenset(tiles[tile].label for tile in journeys.of_tile if journeys.is_always_kept(tile))


def flows(plan: Plan, graph: GraphSchedule) -> list[Flow]:
    """The flow of each operator, that of the head first.

    Transfers are in flight from the operator that starts them on; what an operator releases is still there while it
    computes. Bytes are counted as read once, by the graph that starts to read them.
    """
    journeys, number = plan.journeys, plan.graphs.index(graph)
    operators = range(HEAD, len(graph.operators))
    read: Counter[int] = Counter()
    for stay in journeys:
        if stay.begin.graph == number and stay.moves("fetch"):
            read[stay.begin.operator] += bytes_read(graph.tiles[stay.tile])
    on_device: defaultdict[int, list[range]] = defaultdict(list)
    anywhere: defaultdict[int, list[range]] = defaultdict(list)
    for tile, there, uploaded in journeys.presences(number):
        on_device[tile].append(range(uploaded, there.stop))
        anywhere[tile].append(there)
    device, host = [], []
    for index, ranges in on_device.items():
        tile, uploaded = graph.tiles[index], merged(ranges)
        if tile.needs_buffer:
            device += [(part, tile.gathered_nbytes) for part in uploaded]
        host += [(part, bytes_read(tile)) for part in merged(anywhere[index])]
        host += [(part, -bytes_read(tile)) for part in uploaded]  # it has left host memory
    for gradient in journeys.departures:
        tile = graph.tiles[gradient.tile]
        if gradient.reduced.graph == number and tile.gradient_tier != "device":
            last = gradient.offloaded.operator if gradient.offloaded is not None else operators.stop
            device.append((range(gradient.reduced.operator, last + 1), tile.nbytes))
    both = zip(operators, sums(device, operators), sums(host, operators), strict=True)
    return [Flow(operator, read[operator], *in_flight) for operator, *in_flight in both]


def traffic(plan: Plan, graph: GraphSchedule) -> Traffic:
    """What one graph moves."""
    number = plan.graphs.index(graph)
    uploads = [graph.tiles[s.tile] for s in plan.journeys if s.graph == number and s.moves("upload")]
    offloads = [graph.tiles[e.tile] for e in graph.events if e.kind == "offload"]
    leaving = [graph.tiles[e.tile] for e in graph.events if e.kind in ("offload_activation", "write")]
    return Traffic(
        nvme_to_host=sum(flow.fetched for flow in flows(plan, graph)),
        host_to_device=sum(t.held_nbytes for t in uploads if t.tier != "device"),
        device_to_host=sum(t.gradient_nbytes(plan.stage) for t in offloads if t.gradient_tier != "device")
        + sum(t.held_nbytes for t in leaving if t.tier != "device"),
        host_to_nvme=sum(in_blocks(t, t.gradient_nbytes(plan.stage)) for t in offloads if t.gradient_tier == "nvme")
        + sum(bytes_stored(t) for t in leaving if t.tier == "nvme"),
    )


@dataclass(frozen=True)
class Update:
    """What a step of Adam does to one parameter on one rank.

    Attributes:
        name: the parameter's.
        elements: that this rank updates.
        states: bytes of fp32 states that the arithmetic reads, and writes.
        read, written: bytes from NVMe, and to it.
    """

    name: str
    elements: int
    states: int
    read: int
    written: int


def updates(plan: Plan) -> list[Update]:
    """Of every parameter that is trained, in the order of the plan's tiles: states and gradients are read, states and
    parameters written. A parameter of full precision is its own master, and is read too."""
    tiles: dict[str, list[Tile]] = {}  # the optimizer doesn't divide parameters as the graphs do
    for tile in tiles_of(plan).values():
        if tile.gradient_tier is not None:
            tiles.setdefault(tile.name, []).append(tile)
    found = []
    for tile, *others in tiles.values():
        elements = sum(t.updated_elements(plan.stage) for t in (tile, *others))
        value = blocks(elements * tile.dtype.itemsize)
        has_master = tile.dtype.itemsize < STATE_BYTES
        states = 3 if has_master else 2
        stored = states * blocks(elements * STATE_BYTES) if plan.config.placement.optimizer == "nvme" else 0
        read = stored + (value if tile.gradient_tier == "nvme" else 0)
        read += value if tile.tier == "nvme" and not has_master else 0
        written = stored + (value if tile.tier == "nvme" else 0)
        found.append(Update(tile.name, elements, states * STATE_BYTES * elements, read, written))
    return found


@dataclass(frozen=True)
class Chunk:
    """What an optimizer's step updates at a time: elements and bytes as in `Update`, of the parameters `names`, the
    last of which goes on in the next chunk if it is not among those that `ends` with this one."""

    elements: int
    states: int
    read: int
    written: int
    names: tuple[str, ...]
    ends: tuple[str, ...]


def chunks(plan: Plan) -> list[Chunk]:
    """An optimizer's step, in the order in which forward needs what it updates."""
    size = plan.regions.chunk_elements or plan.config.chunk // STATE_BYTES
    found: list[Chunk] = []
    sums, names, ends = [0, 0, 0, 0], [], []

    def end_chunk() -> None:
        if names:
            found.append(Chunk(*sums, tuple(names), tuple(ends)))
        sums[:] = [0, 0, 0, 0]
        names.clear(), ends.clear()

    for update in updates(plan):
        total = (update.elements, update.states, update.read, update.written)
        done = 0
        while True:
            upto = min(done + size - sums[0], update.elements)
            for number, whole in enumerate(total):  # bytes in proportion, and together exactly all of them
                sums[number] += (whole * upto // update.elements - whole * done // update.elements) if whole else 0
            names.append(update.name)
            done = upto
            if done == update.elements:
                ends.append(update.name)
            if sums[0] >= size:
                end_chunk()
            if done == update.elements:
                break
    end_chunk()
    return found


def optimizer_traffic(plan: Plan) -> Traffic:
    """What a step of Adam moves between NVMe and host."""
    of_parameters = updates(plan)
    return Traffic(
        nvme_to_host=sum(one.read for one in of_parameters), host_to_nvme=sum(one.written for one in of_parameters)
    )


def phases(plan: Plan) -> Iterator[tuple[str, Traffic]]:
    """The traffic of each graph and, when the plan trains something, of the optimizer's step."""
    for graph in plan.graphs:
        yield graph.kind, traffic(plan, graph)
    if any(tile.gradient_tier for tile in tiles_of(plan).values()):
        yield "optimizer", optimizer_traffic(plan)


def bytes_read(tile: Tile) -> int:
    """Bytes that a fetch of the tile reads: none for a tile that lives in memory."""
    return bytes_stored(tile) if tile.tier == "nvme" else 0


def bytes_stored(tile: Tile) -> int:
    """Bytes of the blocks that the tile, or this rank's shard of it, lies in: its ends may share them with its
    neighbours."""
    return in_blocks(tile, tile.held_nbytes)


def in_blocks(tile: Tile, nbytes: int) -> int:
    """Bytes of the blocks that so many bytes of the tile, or of its gradient, lie in."""
    return blocks(tile.start * tile.dtype.itemsize % PAGE + nbytes)


def blocks(nbytes: int) -> int:
    """So many bytes, in whole blocks of the store."""
    return -(-nbytes // PAGE) * PAGE
