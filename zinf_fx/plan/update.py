"""Plan the optimizer's step: in which order chunks are read, updated and written, where they lie, and what a step of
Adam does to each of them on one rank.

[Note: the optimizer's step]
Chunks are in the order in which forward uses their parameters. As many of them as there is room for are in memory at a
time: under update, being read, and being written. They take turns in equal parts of that room, so a chunk is read when
the one that had its part is written. Where there is room for more than the least, backward reads what the first chunks
need besides gradients. The events say the order and the places, not the times: disks vary, and each event happens as
soon as what it needs is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from zinf_fx.adam import STATE_BYTES
from zinf_fx.plan.chunks import AT_A_TIME, AT_ONCE, Member, charged, cut, elements_of_chunk, part_of
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import CHUNKS, PlannedChunk, Slice, Tile, UpdateEvent, UpdateSchedule
from zinf_fx.sizes import blocks


def trained_in(plan: Plan) -> list[Tile]:
    """Return the parameters that an optimizer's step follows the plan for, each as one tile."""
    return whole_parameters(tile for tile in plan.tiles if tile.gradient_tier is not None)


def whole_parameters(tiles: Iterable[Tile]) -> list[Tile]:
    """Return the parameters as one tile each: the optimizer doesn't divide them as the graphs do."""
    parameters: dict[str, Tile] = {}
    for tile in tiles:
        before = parameters.setdefault(tile.name, tile)
        if before is not tile and tile.rows:
            shape = (before.shape[0] + tile.shape[0], *tile.shape[1:])
            parameters[tile.name] = replace(before, shape=shape, shard=before.shard + tile.shard)
    return list(parameters.values())


class BytesOfElement(NamedTuple):
    """The bytes that the update of an element of a parameter takes.

    Attributes:
        opened: bytes in buffers.
        written: those of them that are written back.
        scratch: bytes of fp32 scratch.
    """

    opened: int
    written: int
    scratch: int

    @classmethod
    def of(cls, tile: Tile, own_memory: bool = False) -> BytesOfElement:
        """Return what the update of a tile's parameters takes of host memory. `own_memory`: the device has memory of
        its own, which has the scratch of what is updated there."""
        size = tile.dtype.itemsize
        written = sum(tile.states.bytes_each) * (tile.state_tier == "nvme") + size * (tile.tier == "nvme")
        scratch = 0 if own_memory and tile.state_tier == "device" else tile.states.scratch_bytes
        return cls(written + size * (tile.gradient_tier == "nvme"), written, scratch)

    @classmethod
    def at_most(cls, tiles: Iterable[Tile], own_memory: bool = False) -> BytesOfElement:
        """Return the most that the update of any of some tiles' parameters takes."""
        return cls(*(max(sizes) for sizes in zip(*(cls.of(tile, own_memory) for tile in tiles), strict=True)))


def scratch_of(plan: Plan, elements: int) -> int:
    """Return the bytes of fp32 scratch in host memory of a plan's chunks of so many elements."""
    return scratch_bytes(BytesOfElement.at_most(trained_in(plan), plan.has_own_memory), elements)


def scratch_bytes(of_element: BytesOfElement, elements: int) -> int:
    """Return the bytes of fp32 scratch for chunks of so many elements, which lies before them."""
    return of_element.scratch * min(elements, AT_ONCE)


class _Parameter(NamedTuple):
    """A parameter to be cut into chunks.

    Attributes:
        place: its place in the order of updates.
        tile: the index of its tile.
        member: its number in the tile.
        on_device: whether it is updated on the device.
    """

    place: int
    tile: int
    member: int
    on_device: bool


def update_of(
    plan: Plan,
    elements: int | None = None,
    together: int | None = None,
    *,
    in_backward: bool = False,
    prefetch: bool = True,
) -> UpdateSchedule:
    """Return the optimizer's step that follows a plan's graphs. See [Note: the optimizer's step].

    Args:
        elements: how many elements a chunk has; by default, as the plan's regions or its options say.
        together: how many chunks are in memory at a time; by default, as the plan's regions say.
        in_backward: the optimizer steps in backward, in the order in which gradients are whole.
        prefetch: the step goes on in the next forward pass, so that backward reads ahead.
    """
    if not (trained := trained_in(plan)):
        return UpdateSchedule()
    elements = elements or plan.regions.chunk_elements or elements_of_chunk(plan.config.chunk // STATE_BYTES)
    together = together or plan.regions.chunk_count
    first = {tile.name: len(plan.tiles) - 1 - number for number, tile in enumerate(reversed(plan.tiles))}
    parameters = [
        (_Parameter(place, first[tile.name], member, tile.state_tier == "device"), count)
        for place, tile in enumerate(_in_order_of_updates(plan, trained, in_backward))
        for member, count in enumerate(tile.updated_elements(plan.stage))
    ]
    cuts: list[list[tuple[_Parameter, range]]] = []
    for on_device in (False, True):
        there = [updated for updated in parameters if updated[0].on_device == on_device]
        # The parameters of a pack are a group: where they are stored, too.
        members = [Member((range(count),), joins=owner.member > 0) for owner, count in there]
        for slices in cut(members, elements, AT_A_TIME):
            parts = [pair for piece in slices for pair in zip(piece.members, piece.elements, strict=True)]
            cuts.append([(there[number][0], updated) for number, updated in parts])
    cuts.sort(key=lambda slices: slices[0][0].place)
    chunks = tuple(
        PlannedChunk(
            tuple(Slice(owner.tile, some.start, len(some), owner.member) for owner, some in slices),
            slices[0][0].on_device,
        )
        for slices in cuts
    )
    of_element = BytesOfElement.at_most(trained, plan.has_own_memory)
    scratch, nbytes = scratch_bytes(of_element, elements), elements * of_element.opened
    starts = (part_of(number, nbytes, scratch, together).start for number in range(len(chunks)))
    room = plan.regions.chunks or math.inf  # which ends early where all chunks together take less
    offsets = [start if nbytes and start < room else None for start in starts]
    prefetched = together - 1 if prefetch and together > CHUNKS else 0
    return UpdateSchedule(chunks, tuple(_events(plan, chunks, offsets, together, prefetched)))


def _events(
    plan: Plan, chunks: tuple[PlannedChunk, ...], offsets: list[int | None], together: int, prefetched: int
) -> Iterator[UpdateEvent]:
    """Yield the events in their order. `prefetched`: for how many chunks backward reads what it can."""
    costs = [cost_of(plan, chunk) for chunk in chunks]
    early = [number < prefetched and cost.read > cost.gradients for number, cost in enumerate(costs)]
    for number in range(len(chunks)):
        if early[number]:
            yield UpdateEvent("read_states", number, prefetched=True, offset=offsets[number])
    read = 0
    for number, cost in enumerate(costs):
        for ahead in range(read, min(number + together - 1, len(chunks))):
            if costs[ahead].gradients if early[ahead] else costs[ahead].read:
                yield UpdateEvent("read_states", ahead, offset=offsets[ahead])
            read = ahead + 1
        yield UpdateEvent("update", number, offset=None if cost.read else offsets[number] if cost.written else None)
        if cost.written:
            yield UpdateEvent("write_states", number)


def _in_order_of_updates(plan: Plan, trained: Iterable[Tile], in_backward: bool) -> list[Tile]:
    """Return the trained tiles in the order of first uses or, `in_backward`, of last gradients."""
    events = (event for graph in plan.graphs for event in graph.events)
    if in_backward:
        offloaded = [plan.tiles[event.tile].name for event in events if event.kind == "offload"]
        place = {name: -number for number, name in enumerate(dict.fromkeys(reversed(offloaded)))}
    else:
        place = {name: n for n, name in enumerate(dict.fromkeys(plan.tiles[event.tile].name for event in events))}
    return sorted(trained, key=lambda tile: place.get(tile.name, len(place)))


@dataclass(frozen=True)
class ChunkCost:
    """The cost of a chunk in a step of Adam on one rank.

    Attributes:
        elements: how many elements are updated.
        states: bytes of states that the arithmetic reads, and writes.
        read, written: bytes from NVMe, and to it. A parameter that is its own master, or a part of it, is read too.
        gradients: bytes of `read` that backward makes; the rest is there when the step before is over.
    """

    elements: int = 0
    states: int = 0
    read: int = 0
    written: int = 0
    gradients: int = 0


def cost_of(plan: Plan, chunk: PlannedChunk, in_place: bool = False) -> ChunkCost:
    """Return the cost of a chunk. Slices begin at whole blocks of the store, so all chunks together have exactly what
    their parameters have. `in_place`: gradients that can be are consumed where they were computed, and not read."""
    total = ChunkCost()
    for part in chunk.slices:
        tile, count = plan.tiles[part.tile], part.count
        value = blocks(count * tile.dtype.itemsize)
        states = [count * nbytes for nbytes in tile.states.bytes_each]
        stored = sum(map(blocks, states)) if tile.state_tier == "nvme" else 0
        is_read = tile.gradient_tier == "nvme" and not (in_place and can_be_consumed_in_place(tile))
        gradient = value if is_read else 0
        weights = value if tile.tier == "nvme" else 0
        total = ChunkCost(
            elements=total.elements + count,
            states=total.states + sum(states),
            read=total.read + stored + gradient + (weights if tile.states.reads_weights else 0),
            written=total.written + stored + weights,
            gradients=total.gradients + gradient,
        )
    return total


def costs_of(plan: Plan, update: UpdateSchedule, in_place: bool = False) -> list[ChunkCost]:
    """Return the cost of each chunk."""
    return [cost_of(plan, chunk, in_place) for chunk in update.chunks]


def can_be_consumed_in_place(tile: Tile) -> bool:
    """Whether an optimizer that steps in backward can have the tile's gradient as it was computed, where it updates:
    whole, and not reduced over ranks."""
    return tile.rows is None and tile.ranks == 1


def names_in(plan: Plan, chunk: PlannedChunk) -> tuple[str, ...]:
    """Return the names of the tiles of a chunk's parameters."""
    return tuple(dict.fromkeys(plan.tiles[part.tile].name for part in chunk.slices))


def prefetched_bytes(plan: Plan) -> int:
    """Return the most bytes of buffers that backward takes for what it reads for the optimizer's step."""
    early = [plan.update.chunks[event.chunk] for event in plan.update.events if event.prefetched]
    if not early:
        return 0
    return scratch_of(plan, plan.regions.chunk_elements) + sum(chunk_bytes(plan, chunk)[1] for chunk in early)


def chunk_bytes(plan: Plan, chunk: PlannedChunk) -> tuple[int, int]:
    """Return the bytes of a chunk's buffers in host memory while it is open, and those that are written of them."""
    slices = [(BytesOfElement.of(plan.tiles[part.tile]), charged(part.count)) for part in chunk.slices]
    opened = sum(of_tile.opened * elements for of_tile, elements in slices)
    return opened, sum(of_tile.written * elements for of_tile, elements in slices)
