"""What a step holds in the host arena, event by event, and how much of it the plan sets apart.

The arena is where the bytes of the host tier live, and all buffers between the disk and compute: of tiles, of gradients
on their way to the disk, and of the optimizer's chunks. On the CPU there is no other memory that a plan hands out.
Everything else of a process (activations, the gradient of the operator that computes, PyTorch itself) is not in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

from zinf_fx.config import Config, Placement, Tier
from zinf_fx.plan.memory.accounting import AT_A_TIME, CHUNKS_IN_MEMORY, STATE_BYTES, blocks, tiles_of
from zinf_fx.plan.memory.lifetimes import Clock, host_buffers, profile
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import HEAD, GraphSchedule, Tile
from zinf_fx.sizes import WINDOW_ALIGNMENT

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
        chunks: of the optimizer's step.
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
        living = self.parameters + self.states + self.gradients + self.activations
        return living + self.tiles + self.writes + self.chunks


class ChunkBytes(NamedTuple):
    """Per element of a parameter, what an update has in buffers, and what of it is written back; and fp32 scratch."""

    opened: int
    written: int
    scratch: int

    @classmethod
    def of(cls, placement: Placement, tile: Tile) -> ChunkBytes:
        """For Adam (ZeRO, section 3.1): two moments and, of a parameter of low precision, a master, in fp32."""
        size = tile.dtype.itemsize
        low = size < STATE_BYTES
        written = (2 * max(size, STATE_BYTES) + low * STATE_BYTES) * (placement.optimizer == "nvme")
        written += size * (tile.tier == "nvme")
        return cls(written + size * (tile.gradient_tier == "nvme"), written, STATE_BYTES * low)


def gradient_buffer(gradients: Collection[Tile], budget: int | None, stage: int) -> int:
    """Bytes of gradients that may be on their way to NVMe at once, for tiles whose gradients are computed."""
    sizes = [tile.gradient_nbytes_at_once(stage) for tile in gradients if tile.gradient_tier == "nvme"]
    return write_buffer(sizes, budget)


def write_buffer(sizes: Collection[int], budget: int | None) -> int:
    """Bytes that may be on their way to NVMe at once, of tensors of these sizes."""
    limit = _WRITE_BUFFER if budget is None else min(_WRITE_BUFFER, budget // _WRITE_SHARE)
    return max(max(sizes, default=0), min(limit, sum(sizes)))


def living_on_host(placement: Placement | Literal["auto"], tiles: Collection[Tile]) -> HostUse:
    """What of a model's states lives in the arena at the end of backward, before any buffer. Each has whole blocks."""
    return _living("host", placement, tiles)


def living_on_device(placement: Placement | Literal["auto"], tiles: Collection[Tile]) -> HostUse:
    """As `living_on_host`, what lives on the device."""
    return _living("device", placement, tiles)


def living_on_nvme(placement: Placement | Literal["auto"], tiles: Collection[Tile]) -> HostUse:
    """As `living_on_host`, what lives on NVMe."""
    return _living("nvme", placement, tiles)


def _living(tier: Tier, placement: Placement | Literal["auto"], tiles: Collection[Tile]) -> HostUse:
    if not tiles or placement == "auto":  # only a model without stored parameters is planned with "auto"
        return HostUse("")
    stage = placement.stage
    whole = _whole(tile for tile in tiles if not tile.activation)
    trained = [tile for tile in whole if tile.gradient_tier is not None]
    return HostUse(
        "",
        parameters=sum(blocks(tile.held_nbytes) for tile in whole if tile.tier == tier),
        gradients=sum(blocks(tile.gradient_nbytes(stage)) for tile in trained if tile.gradient_tier == tier),
        states=sum(_state_bytes(tile, stage) for tile in trained) if placement.optimizer == tier else 0,
        activations=sum(blocks(tile.held_nbytes) for tile in tiles if tile.activation and tile.tier == tier),
    )


class ChunkBuffers(NamedTuple):
    """Of an optimizer's step: the elements of a chunk, and bytes of buffers.

    `opened` from its beginning on, for the fp32 scratch, a chunk under update and the next one; `later` for the one
    before, when no gradients are on their way to NVMe any more. Chunks take turns in these three equal parts. Of the
    third, `writing` is needed while there are the others.
    """

    elements: int = 0
    opened: int = 0
    later: int = 0
    writing: int = 0

    @property
    def total(self) -> int:
        """All room."""
        return self.opened + self.later


def chunk_buffers(
    config: Config, trained: Collection[Tile], room: int | None = None, elements: int | None = None
) -> ChunkBuffers:
    """The buffers of a step of Adam.

    `room`: what the arena has left, where it is limited; a chunk takes at most a quarter of it. `elements`: of a chunk,
    at most; default as `config` says.
    """
    if not trained:
        return ChunkBuffers()
    bytes_of = [ChunkBytes.of(config.placement, tile) for tile in trained]
    opened, written, scratch = (max(sizes) for sizes in zip(*bytes_of, strict=True))
    chunk = config.chunk // STATE_BYTES if elements is None else elements
    if room is not None:
        chunk = min(chunk, max(room, 0) // max(CHUNKS_IN_MEMORY * (opened + scratch), 1))
    chunk = max(chunk // WINDOW_ALIGNMENT, 1) * WINDOW_ALIGNMENT
    stage = config.placement.stage
    updated = [tile.updated_elements(0 if tile.owned else stage) for tile in trained]  # an owner may have all
    total = sum(-(-elements // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT for elements in updated)
    both, three = (min(total, count * chunk) * opened for count in (2, 3))
    writing = max(three - both - chunk * (opened - written), 0)
    return ChunkBuffers(chunk, both + min(chunk, AT_A_TIME) * scratch, three - both, writing)


def trained_in(plan: Plan) -> list[Tile]:
    """The parameters, each as one tile, that an optimizer's step follows the plan for."""
    if not any(graph.kind == "backward" for graph in plan.graphs):
        return []
    return _whole([tile for tile in tiles_of(plan).values() if tile.gradient_tier is not None])


def living(plan: Plan) -> HostUse:
    """The states of the plan's parameters that live in host memory."""
    return living_on_host(plan.config.placement, list(tiles_of(plan).values()))


def chunks_of(plan: Plan, elements: int | None = None) -> ChunkBuffers:
    """The buffers of the optimizer's step that follows the plan's graphs; `elements` of a chunk, as far as given or,
    with regions, planned."""
    elements = elements or plan.regions.chunk_elements or None
    room = plan.config.host_memory
    if room is not None:
        now = profile(host_buffers(plan), Clock(plan).end)[Clock(plan).step]
        room -= living(plan).total + now
    return chunk_buffers(plan.config, trained_in(plan), room, elements)


def host_arena(plan: Plan) -> list[HostUse]:
    """The use of the arena in each phase of a step, in the steady state; gradients begin as None in each step."""
    clock, states = Clock(plan), living(plan)
    buffers = host_buffers(plan)
    tiles = profile([buffer for buffer in buffers if buffer.what == "tile"], clock.end)
    writes = profile([buffer for buffer in buffers if buffer.what == "write"], clock.end)
    found = []
    for number, graph in enumerate(plan.graphs):
        # A graph begins with what the one before has in memory: activations are on their way until backward begins.
        before = 1 if number else 0
        times = range(clock.starts[number] - before, clock.starts[number + 1])
        uses = (
            replace(states, phase=graph.kind, gradients=arrived, tiles=tiles[now], writes=writes[now])
            for now, arrived in zip(times, chain([0] * before, _gradients(plan, graph)), strict=True)
        )
        found.append(max(uses, key=lambda use: use.total, default=replace(states, phase=graph.kind)))
    if trained_in(plan):
        chunks = chunks_of(plan)
        use = replace(states, phase="optimizer", tiles=tiles[clock.step])
        found.append(replace(use, chunks=chunks.opened + max(chunks.writing, writes[clock.step])))
    return found


def most(plan: Plan) -> int:
    """Bytes of the host arena that training, or inference, takes: the states that live in it, and the plan's region."""
    return living(plan).total + plan.regions.host


def most_on_device(plan: Plan) -> int:
    """Bytes that a plan takes of a device with memory of its own: what is there throughout, activations, the region of
    tiles, and the gradients on their way out."""
    states = living_on_device(plan.config.placement, list(tiles_of(plan).values()))
    return plan.unmoved + states.total + plan.kept + plan.regions.device + max(map(_leaving, plan.graphs), default=0)


def _leaving(graph: GraphSchedule) -> int:
    """The most bytes of gradients, which don't live on the device, from reduce-scatter to offload."""
    now = most_so_far = 0
    for event in graph.events:
        tile = graph.tiles[event.tile]
        if tile.gradient_tier != "device":
            now += tile.nbytes * ((event.kind == "reduce_scatter") - (event.kind == "offload"))
            most_so_far = max(most_so_far, now)
    return most_so_far


def arena_by_operator(plan: Plan, graph: GraphSchedule) -> list[int]:
    """Bytes of the arena at its fullest while each operator of a graph computes, that of the head first.

    In the steady state; without the optimizer's step, part of which may go on during the forward graph.
    """
    clock, states = Clock(plan), replace(living(plan), gradients=0).total
    needed = profile(host_buffers(plan), clock.end)
    begin = clock.starts[plan.graphs.index(graph)]
    now = states + needed[begin - 1]  # before the first step comes the last
    numbered = deque(zip(graph.events, needed[begin:], _gradients(plan, graph), strict=False))
    fullest = []
    for operator in (HEAD, *(o.index for o in graph.operators)):
        most_here = now
        while numbered and numbered[0][0].operator == operator:
            _, buffers, gradients = numbered.popleft()
            now = states + buffers + gradients
            most_here = max(most_here, now)
        fullest.append(most_here)
    return fullest


def _gradients(plan: Plan, graph: GraphSchedule) -> Iterator[int]:
    """Bytes of gradients in host memory that have arrived after each event."""
    stage = plan.stage
    whole = {tile.name: tile for tile in _whole(graph.tiles)}
    begun: set[str] = set()
    arrived = 0
    for event in graph.events:
        tile = graph.tiles[event.tile]
        if event.kind == "offload" and tile.gradient_tier == "host" and tile.name not in begun:
            begun.add(tile.name)
            arrived += blocks(whole[tile.name].gradient_nbytes(stage))
        yield arrived


def _whole(tiles: Iterable[Tile]) -> list[Tile]:
    """Parameters as one tile each."""
    found: dict[str, Tile] = {}
    for tile in tiles:
        before = found.get(tile.name)
        if before is None:
            found[tile.name] = tile
        elif tile.rows:
            shape = (before.shape[0] + tile.shape[0], *tile.shape[1:])
            found[tile.name] = replace(before, shape=shape, shard=before.shard + tile.shard)
    return list(found.values())


def _state_bytes(tile: Tile, stage: int) -> int:
    """Of Adam's states of a parameter: two moments and, in low precision, a master."""
    size = tile.dtype.itemsize
    return (2 + (size < STATE_BYTES)) * blocks(tile.updated_elements(stage) * max(size, STATE_BYTES))
