"""What a step holds in the host arena, simulated event by event.

The arena is where the bytes of the host tier live, and all buffers between the disk and compute: of tiles, of gradients
on their way to the disk, and of the optimizer's chunks. On the CPU there is no other memory that a plan hands out.
Everything else of a process (activations, the gradient of the operator that computes, PyTorch itself) is not in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from zinf_fx.config import Config, Placement, Tier
from zinf_fx.plan.accounting import CHUNKS_IN_MEMORY, STATE_BYTES, blocks, bytes_read, staying, tiles_of
from zinf_fx.plan.schedule import HEAD, GraphSchedule, Plan, Tile

# Elements of the chunks that the optimizer cuts parameters into are a multiple of this.
_CHUNK_ALIGNMENT = 4096
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
        writes: gradients and activations on their way to NVMe.
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


def gradient_buffer(gradients: Collection[Tile], budget: int | None) -> int:
    """Bytes of gradients that may be on their way to NVMe at once, for tiles whose gradients are computed."""
    return write_buffer([tile.nbytes for tile in gradients if tile.gradient_tier == "nvme"], budget)


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


def _living(tier: Tier, placement: Placement | Literal["auto"], tiles: Collection[Tile]) -> HostUse:
    if not tiles or placement == "auto":  # only a model without stored parameters is planned with "auto"
        return HostUse("")
    whole = _whole(tile for tile in tiles if not tile.activation)
    trained = [tile for tile in whole if tile.gradient_tier is not None]
    return HostUse(
        "",
        parameters=sum(blocks(tile.nbytes) for tile in whole if tile.tier == tier),
        gradients=sum(blocks(tile.nbytes) for tile in trained if tile.gradient_tier == tier),
        states=sum(_state_bytes(tile) for tile in trained) if placement.optimizer == tier else 0,
        activations=sum(blocks(tile.nbytes) for tile in tiles if tile.activation and tile.tier == tier),
    )


def chunk_buffers(config: Config, trained: Collection[Tile], room: int | None = None, writes: int = 0) -> int:
    """Bytes of buffers of a step of Adam: a chunk under update, the next one, and the writes of the one before.

    `room`: what the arena has left, where it is limited; a chunk takes at most a quarter of it. `writes`: bytes that
    are on their way to NVMe when the step begins.
    """
    if not trained:
        return 0
    bytes_of = [ChunkBytes.of(config.placement, tile) for tile in trained]
    opened, written, scratch = (max(sizes) for sizes in zip(*bytes_of, strict=True))
    chunk = config.chunk // STATE_BYTES
    if room is not None:
        chunk = min(chunk, max(room, 0) // max(CHUNKS_IN_MEMORY * (opened + scratch), 1))
    chunk = max(chunk // _CHUNK_ALIGNMENT, 1) * _CHUNK_ALIGNMENT
    total = sum(-(-(t.nbytes // t.dtype.itemsize) // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT for t in trained)
    both = min(total, 2 * chunk) * opened
    three = min(total - chunk, 2 * chunk) * opened + chunk * written if total > 2 * chunk else 0
    return max(both + writes, three) + chunk * scratch


def host_arena(plan: Plan) -> list[HostUse]:
    """The use of the arena in each phase of a step, in the steady state; gradients begin as None in each step."""
    tiles = tiles_of(plan)
    living = living_on_host(plan.config.placement, list(tiles.values()))
    found = [
        max((replace(living, phase=graph.kind, **use._asdict()) for use in _uses(plan, graph)), key=lambda u: u.total)
        for graph in plan.graphs
    ]
    trained = [tile for tile in tiles.values() if tile.gradient_tier is not None]
    if trained and any(graph.kind == "backward" for graph in plan.graphs):
        *_, end = _uses(plan, plan.graph("backward"))
        use = replace(living, phase="optimizer", tiles=end.tiles)
        room = None if plan.config.host_memory is None else plan.config.host_memory - use.total - end.writes
        found.append(replace(use, chunks=chunk_buffers(plan.config, _whole(trained), room, end.writes)))
    return found


def most(plan: Plan) -> int:
    """Bytes of the host arena that training, or inference, takes at most, when an optimizer's step goes on during the
    next forward graph."""
    uses = {use.phase: use for use in host_arena(plan)}
    peak = max(use.total for use in uses.values())
    if "optimizer" in uses and "forward" in uses and uses["optimizer"].chunks:
        step = uses["optimizer"]
        together = step.total - step.tiles + uses["forward"].tiles
        peak = max(peak, together)
    return peak if plan.config.host_memory is None else min(peak, plan.config.host_memory)


def arena_by_operator(plan: Plan, graph: GraphSchedule) -> list[int]:
    """Bytes of the arena at its fullest while each operator of a graph computes, that of the head first.

    In the steady state; without the optimizer's step, part of which may go on during the forward graph.
    """
    living = living_on_host(plan.config.placement, list(tiles_of(plan).values()))
    now, *after = (replace(living, **use._asdict()).total for use in _uses(plan, graph))
    fullest = []
    numbered = deque(zip((event.operator for event in graph.events), after, strict=True))
    for operator in (HEAD, *(o.index for o in graph.operators)):
        most_here = now
        while numbered and numbered[0][0] == operator:
            now = numbered.popleft()[1]
            most_here = max(most_here, now)
        fullest.append(most_here)
    return fullest


class _Use(NamedTuple):
    gradients: int
    tiles: int
    writes: int


def _uses(plan: Plan, graph: GraphSchedule) -> Iterator[_Use]:
    """The use of the arena by what a graph moves: at its head, and after each of its events."""
    sizes = {label: bytes_read(plan, tile) for label, tile in tiles_of(plan).items()}
    whole = {tile.name: tile for tile in _whole(graph.tiles)}
    there = set(staying(plan)[graph.kind])
    for_turn: set[int] = set()
    begun: set[str] = set()
    gradients = 0
    writes: deque[int] = deque()
    yield _Use(0, sum(sizes[label] for label in there), 0)
    for event in graph.events:
        tile = graph.tiles[event.tile]
        if event.kind == "fetch":
            there.add(tile.label)
            for_turn |= {tile.index} if event.turn else set()
        elif event.kind == "release" and not event.resident and tile.index not in for_turn:
            there.discard(tile.label)
        elif event.kind == "offload" and tile.gradient_tier == "host" and tile.name not in begun:
            begun.add(tile.name)
            gradients += blocks(whole[tile.name].nbytes)
        elif (event.kind == "offload" and tile.gradient_tier == "nvme") or (
            event.kind == "offload_activation" and tile.tier == "nvme"
        ):
            buffer = plan.gradient_buffer if event.kind == "offload" else plan.activation_buffer
            nbytes = blocks(tile.start * tile.dtype.itemsize % blocks(1) + tile.nbytes)
            while sum(writes) > max(buffer - nbytes, 0):
                writes.popleft()
            writes.append(nbytes)
        yield _Use(gradients, sum(sizes[label] for label in there), sum(writes))


def _whole(tiles: Iterable[Tile]) -> list[Tile]:
    """Parameters as one tile each."""
    found: dict[str, Tile] = {}
    for tile in tiles:
        rows = tile.shape[0] if tile.rows and tile.name in found else 0
        before = found.get(tile.name)
        found[tile.name] = tile if before is None else replace(before, shape=(before.shape[0] + rows, *tile.shape[1:]))
    return list(found.values())


def _state_bytes(tile: Tile) -> int:
    """Of Adam's states of a parameter: two moments and, in low precision, a master."""
    size = tile.dtype.itemsize
    return (2 + (size < STATE_BYTES)) * blocks(tile.nbytes // size * max(size, STATE_BYTES))
