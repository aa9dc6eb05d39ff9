"""What a step holds in the host arena, event by event, and how much of it the plan sets apart.

The arena is where the bytes of the host tier live, and all buffers between the disk and compute: of tiles, of gradients
on their way to the disk, and of the optimizer's chunks. On the CPU there is no other memory that a plan hands out.
Everything else of a process (activations, the gradient of the operator that computes, PyTorch itself) is not in it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple, dataclass, replace

from zinf_fx.adam import STATE_BYTES
from zinf_fx.config import Config, Tier
from zinf_fx.plan.chunks import elements_of_chunk
from zinf_fx.plan.intervals import sums
from zinf_fx.plan.memory.buffers import Clock, host_buffers, profile
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import CHUNKS, PROLOGUE, GraphSchedule, Tile
from zinf_fx.plan.update import (
    BytesOfElement,
    chunk_bytes,
    prefetched_bytes,
    scratch_bytes,
    scratch_of,
    trained_in,
    whole_parameters,
)
from zinf_fx.sizes import WINDOW_ALIGNMENT, blocks, round_up

# Writes on their way to NVMe, whatever the model, as far as one tensor is not larger (ZeRO, section 6.2).
_WRITE_BUFFER = 64 << 20
# The part of a budget that they may take.
_WRITE_SHARE = 4


@dataclass(frozen=True)
class HostUse:
    """Bytes of the host arena in one phase of a step, at its fullest.

    Attributes:
        phase: "forward", "backward", "inference" or "optimizer".
        parameters, states: those that live in host memory.
        gradients: those of them that have arrived by then.
        activations: those that live in host memory from forward to backward.
        tiles: of the NVMe tier, from fetch to release, and what stays between uses.
        writes: gradients, activations, and what forward writes to parameters, on their way to NVMe.
        chunks: of the optimizer's step, or of the one that comes next, as far as backward reads ahead.
    """

    phase: str
    parameters: int = 0
    states: int = 0
    gradients: int = 0
    activations: int = 0
    tiles: int = 0
    writes: int = 0
    chunks: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(astuple(self)[1:])


def gradient_buffer(gradients: Collection[Tile], budget: int | None, stage: int) -> int:
    """Bytes of gradients that may be on their way to NVMe at once, for tiles whose gradients are computed."""
    sizes = [tile.gradient_nbytes_at_once(stage) for tile in gradients if tile.gradient_tier == "nvme"]
    return write_buffer(sizes, budget)


def write_buffer(sizes: Collection[int], budget: int | None) -> int:
    """Bytes that may be on their way to NVMe at once, of tensors of these sizes."""
    limit = _WRITE_BUFFER if budget is None else min(_WRITE_BUFFER, budget // _WRITE_SHARE)
    return max(max(sizes, default=0), min(limit, sum(sizes)))


def living_on(tier: Tier, tiles: Collection[Tile], stage: int) -> HostUse:
    """What of a model's states lives in a memory at the end of backward, before any buffer, at a stage of ZeRO. Each
    has whole blocks."""
    whole = whole_parameters(tile for tile in tiles if not tile.activation)
    trained = [tile for tile in whole if tile.gradient_tier is not None]
    return HostUse(
        "",
        parameters=sum(blocks(tile.held_nbytes) for tile in whole if tile.tier == tier),
        gradients=sum(blocks(tile.gradient_nbytes(stage)) for tile in trained if tile.gradient_tier == tier),
        states=sum(_state_bytes(tile, stage, tier) for tile in trained),
        activations=sum(blocks(tile.held_nbytes) for tile in tiles if tile.activation and tile.tier == tier),
    )


@dataclass(frozen=True)
class ChunkBuffers:
    """Of an optimizer's step: the elements of a chunk, and bytes of buffers.

    `opened` from its beginning on, for the fp32 scratch, a chunk under update and those that follow it; `later` for the
    one before, when no gradients are on their way to NVMe any more.
    """

    elements: int = 0
    opened: int = 0
    later: int = 0

    @property
    def total(self) -> int:
        """All room."""
        return self.opened + self.later


def chunk_buffers(
    config: Config,
    trained: Collection[Tile],
    room: int | None = None,
    elements: int | None = None,
    count: int = CHUNKS,
    own_memory: bool = False,
) -> ChunkBuffers:
    """The buffers of a step of Adam in host memory.

    `room`: what the arena has left, where it is limited; a chunk takes at most a quarter of it. `elements`: of a chunk,
    at most; default as `config` says. `count`: of chunks that are there at a time.
    `own_memory`: as of `BytesOfElement.of`.
    """
    if not trained:
        return ChunkBuffers()
    opened, _, scratch = of_element = BytesOfElement.at_most(trained, own_memory)
    chunk = config.chunk // STATE_BYTES if elements is None else elements
    chunk = elements_of_chunk(chunk, opened + scratch, room)
    together = 0  # bytes that the update of all takes
    for tile in trained:
        counts = tile.updated_elements(0 if tile.owned else config.stage)  # an owner may have all
        together += sum(round_up(count, WINDOW_ALIGNMENT) for count in counts) * BytesOfElement.of(tile).opened
    most = min(together, count * chunk * opened)
    before = min(together, (count - 1) * chunk * opened)
    return ChunkBuffers(chunk, before + scratch_bytes(of_element, chunk), most - before)


def host_states(plan: Plan) -> HostUse:
    """The states of the plan's parameters that live in host memory."""
    return living_on("host", plan.tiles, plan.stage)


def plan_chunk_buffers(plan: Plan, elements: int | None = None, count: int | None = None) -> ChunkBuffers:
    """The buffers of the optimizer's step that follows the plan's graphs; `elements` of a chunk, as far as given or,
    with regions, planned, and `count` of them."""
    elements = elements or plan.regions.chunk_elements or None
    count = count or plan.regions.chunk_count
    room = plan.config.host_memory
    if room is not None:
        now = profile(host_buffers(plan), Clock(plan).end)[Clock(plan).step]
        room -= host_states(plan).total + now
    return chunk_buffers(plan.config, trained_in(plan), room, elements, count, plan.has_own_memory)


def host_arena(plan: Plan) -> list[HostUse]:
    """The use of the arena in each phase of a step, in the steady state; gradients begin as None in each step."""
    clock, states = Clock(plan), host_states(plan)
    buffers, gradients = host_buffers(plan), _gradients(plan)
    tiles = profile([buffer for buffer in buffers if buffer.what == "tile"], clock.end)
    writes = profile([buffer for buffer in buffers if buffer.what == "write"], clock.end)
    phases = []
    for number, graph in enumerate(plan.graphs):
        # A graph begins with what the one before has in memory: activations are on their way until backward begins.
        times = range(max(clock.starts[number] - 1, 0), clock.starts[number + 1])
        there = replace(states, phase=graph.kind, chunks=_read_ahead(plan, graph))
        uses = (replace(there, gradients=gradients[now], tiles=tiles[now], writes=writes[now]) for now in times)
        phases.append(max(uses, key=lambda use: use.total, default=there))
    if plan.update.chunks:
        use = replace(states, phase="optimizer", tiles=tiles[clock.step])
        phases.append(replace(use, chunks=_chunks_at_once(plan, writes[clock.step])))
    return phases


def _chunks_at_once(plan: Plan, leaving: int) -> int:
    """Return the most bytes that scratch and chunks take at a time: one is written while those after it are open.

    `leaving` are the bytes of gradients that are on their way to NVMe when the step begins.
    """
    count = plan.regions.chunk_count
    opened, written = zip(*(chunk_bytes(plan, chunk) for chunk in plan.update.chunks), strict=True)
    # With more chunks than the least, their room is for nothing else; else the last one's is where writes were.
    both = sum if count > CHUNKS else max
    chunks = max(
        sum(opened[first : first + count - 1]) + both((written[first - 1] if first else 0, leaving))
        for first in range(len(opened))
    )
    return chunks + scratch_of(plan, plan_chunk_buffers(plan).elements)


def peak_host_bytes(plan: Plan) -> int:
    """Bytes of the host arena that training, or inference, takes: the states that live in it, and the plan's region."""
    return host_states(plan).total + plan.regions.host


def staying_on_device(plan: Plan) -> int:
    """Bytes of the device besides what is in flight: what no event moves, the states that live there, and the
    activations that stay there for backward."""
    return plan.unmoved + living_on("device", plan.tiles, plan.stage).total + plan.kept


def peak_device_bytes(plan: Plan) -> int:
    """Bytes that a plan takes of a device with memory of its own: what stays there, the region of tiles, and the
    gradients on their way out, each from its reduce-scatter to its offload."""
    clock = Clock(plan)
    leaving = [
        (
            range(clock.at(reduced), clock.at(offloaded) if offloaded is not None else clock.step),
            plan.tiles[tile].nbytes,
        )
        for tile, reduced, offloaded in plan.lifetimes.gradient_offloads
        if plan.tiles[tile].gradient_tier != "device"
    ]
    return staying_on_device(plan) + plan.regions.device + max(sums(leaving, clock.always))


def room_on_device(plan: Plan) -> int:
    """Bytes of `device_memory` that a plan for a device with memory of its own takes at no time; 0 without a budget."""
    if plan.config.device_memory is None or not plan.has_own_memory:
        return 0
    return max(plan.config.device_memory - peak_device_bytes(plan), 0)


def arena_by_operator(plan: Plan, graph: GraphSchedule) -> list[int]:
    """Bytes of the arena at its fullest while each operator of a graph computes, that of the prologue first.

    In the steady state; without the optimizer's step, part of which may go on during the forward graph, but with what
    backward reads for the next one.
    """
    clock, states = Clock(plan), replace(host_states(plan), gradients=0).total + _read_ahead(plan, graph)
    held = [states + sum(both) for both in zip(profile(host_buffers(plan), clock.end), _gradients(plan), strict=True)]
    now, fullest = clock.starts[plan.graphs.index(graph)], []
    for operator in (PROLOGUE, *(o.index for o in graph.operators)):
        end = now + len(graph.numbered(operator))
        fullest.append(max([held[now - 1], *held[now:end]]))  # before the first step comes the last
        now = end
    return fullest


def _read_ahead(plan: Plan, graph: GraphSchedule) -> int:
    """Bytes of the optimizer's chunks that are open at most while a graph computes, for the step that follows it."""
    return prefetched_bytes(plan) if graph.kind == "backward" else 0


def _gradients(plan: Plan) -> list[int]:
    """Bytes of gradients in host memory at each time: of a parameter, from the first offload to its graph's end."""
    clock, first = Clock(plan), {}
    for index, _, offloaded in plan.lifetimes.gradient_offloads:
        if plan.tiles[index].gradient_tier == "host" and offloaded is not None:
            name = plan.tiles[index].name
            first[name] = min(offloaded, first.get(name, offloaded))
    nbytes = {tile.name: blocks(tile.gradient_nbytes(plan.stage)) for tile in whole_parameters(plan.tiles)}
    spans = [(range(clock.at(at), clock.starts[at.graph + 1]), nbytes[name]) for name, at in first.items()]
    return sums(spans, clock.always)


def _state_bytes(tile: Tile, stage: int, tier: Tier) -> int:
    """Bytes of Adam's states of a tile's parameters on a tier, each in whole blocks; scales and bits are in memory."""
    counts = tile.updated_elements(stage)
    itemsizes = tile.states.bytes_each if tile.state_tier == tier else ()
    nbytes = [elements * itemsize for elements in counts for itemsize in itemsizes]
    if tier == ("device" if tile.state_tier == "device" else "host"):
        nbytes += [companion for elements in counts for companion in tile.states.companions_nbytes(elements)]
    return sum(map(blocks, nbytes))
