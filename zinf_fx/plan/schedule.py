"""The schedule: what is moved and computed, in which order, as pure data. What events mean is in `plan.lifetimes`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from zinf_fx.adam import SPLIT, AdamStates, MasterForm, StateForm
from zinf_fx.config import Natural, Positive, Tier
from zinf_fx.sizes import blocks

GraphKind = Literal["forward", "backward", "inference"]
EventKind = Literal[
    "fetch", "upload", "allgather", "wait", "release", "reduce_scatter", "offload", "offload_activation", "write"
]
UpdateKind = Literal["read_states", "update", "write_states"]

# The operator number of what happens before the first operator.
PROLOGUE = -1
CHUNKS = 3
"""Chunks of an optimizer's step that are in memory: one is read, one updated, and one written."""


@dataclass(frozen=True)
class PackMember:
    """A parameter in a pack: its qualified name, its shape, its first element there, and as of a tile, its `shard`."""

    name: str
    shape: tuple[Natural, ...]
    start: Natural
    shard: Natural = 0

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Tile:
    """The unit of transfer and schedule: one parameter, some rows of a large one, a pack of small ones, or an
    activation that leaves in forward and comes back in backward.

    Attributes:
        name: the parameter's qualified name, as in `named_parameters()`.
        tier: where it lives between uses.
        gradient_tier: where its gradient goes; None when the graph computes none for it.
        state_tier: where the optimizer's states of it live; None when the graph computes no gradient for it.
        state_dtype: what these are kept in, masters besides; None: the dtype of the update.
        master_dtype: the same of masters.
        rows: first row of the parameter and the one after the last, when the parameter has several tiles.
        activation: whether it is an activation: as flat as it lies in memory, and other values in every step.
        ranks: how many it is divided over; of an activation, those of tensor parallelism.
        shard: elements of it, with padding, that one of them is responsible for; 0 with one rank.
        replicas: how many such groups of ranks train together.
        segment: elements of the parts that are divided over the ranks by themselves, of which tiles consist; 0: the
            parameter is not made of any.
        owned: whether one of the ranks has all of it, and the others nothing; `shard` is the average then.
        partitioned: whether each rank has no more than its shard of the parameter between uses.
        members: the parameters of a pack, which lie in whole blocks of the store each; its shape is that of all. See
            [Note: packs over ranks].

    [Note: packs over ranks]
    Each parameter of a pack is divided over the ranks by itself, as any other, and a rank's shard of the pack is its
    shards of them in a row. So one collective gathers the pack, or reduces its gradients. What it gathers are the
    shards of one rank after the other: a parameter of which the first rank has all elements lies in one piece there,
    and the others are copied after it.
    """

    name: str
    shape: tuple[Natural, ...]
    dtype: torch.dtype
    tier: Tier
    gradient_tier: Tier | None
    rows: tuple[Natural, Natural] | None = None
    activation: bool = False
    ranks: Positive = 1
    shard: Natural = 0
    partitioned: bool = False
    replicas: Positive = 1
    segment: Natural = 0
    owned: bool = False
    members: tuple[PackMember, ...] = ()
    state_tier: Tier | None = None
    state_dtype: StateForm | None = None
    master_dtype: MasterForm | None = None

    @cached_property
    def label(self) -> str:
        """The parameter's name, and the rows where they are not all: `mlp.up.weight[0:512]`."""
        return self.name if self.rows is None else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"

    @cached_property
    def start(self) -> int:
        """The tile's first element in its parameter."""
        return 0 if self.rows is None else self.rows[0] * math.prod(self.shape[1:])

    @cached_property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def states(self) -> AdamStates:
        """What Adam keeps of it."""
        return AdamStates(self.dtype.itemsize, self.state_dtype, self.master_dtype == SPLIT)

    @property
    def shard_nbytes(self) -> int:
        """The size of one rank's shard in bytes: with one rank, of all elements, without what lies between a pack's."""
        if self.ranks > 1:
            return self.shard * self.dtype.itemsize
        return sum(member.numel for member in self.members) * self.dtype.itemsize if self.members else self.nbytes

    @property
    def _shard_held_nbytes(self) -> int:
        """What a rank's shard takes where it lives, in bytes: in a pack, each parameter's whole blocks."""
        if self.ranks > 1 and self.members:
            return sum(blocks(member.shard * self.dtype.itemsize) for member in self.members)
        return self.shard_nbytes if self.ranks > 1 else self.nbytes

    @property
    def held_nbytes(self) -> int:
        """What a rank has of the parameter between uses, in bytes."""
        return self._shard_held_nbytes if self.partitioned else self.nbytes

    @property
    def gathered_nbytes(self) -> int:
        """What a rank has of it while it is in use, in bytes: of a partitioned parameter, all shards with padding, and
        those of a pack's parameters that no rank has all of, copied (see [Note: packs over ranks])."""
        if not self.partitioned:
            return self.nbytes
        copied = sum(member.shard for member in self.members if member.numel > member.shard)
        return self.ranks * (self.shard + copied) * self.dtype.itemsize

    @property
    def needs_buffer(self) -> bool:
        """Whether it is somewhere else while it is in use than where it lives."""
        return self.tier != "device" or self.partitioned

    def gradient_nbytes(self, stage: int) -> int:
        """What a rank keeps of the gradient, in bytes, at a stage of ZeRO."""
        return self._shard_held_nbytes if stage >= 2 else self.nbytes

    def gradient_nbytes_at_once(self, stage: int) -> int:
        """What of the gradient leaves a rank at once, in bytes: an owner's, all of it."""
        return self.nbytes if self.owned else self.gradient_nbytes(stage)

    def updated_elements(self, stage: int) -> list[int]:
        """Return, for each parameter, how many elements a rank has the optimizer's states of, at a stage of ZeRO."""
        if self.members:
            divided = stage >= 1 and self.ranks > 1
            return [member.shard if divided else member.numel for member in self.members]
        return [(self.shard_nbytes if stage >= 1 else self.nbytes) // self.dtype.itemsize]

    @property
    def opens_operator(self) -> bool:
        """Matrices separate operators; vectors (biases, norms) ride along, so repeated layers give equal regions."""
        return any(len(parameter.shape) >= 2 for parameter in self.members or (self,))


@dataclass(frozen=True)
class Event:
    """One step of a tile's live range, or of a gradient's way out, started (or, for a wait, ended) in an operator.

    `for_backward`: the forward graph starts it for the backward graph.
    `resident`: of a release, that the tile stays in memory until its next fetch; of that fetch and the upload and
    all-gather after it, that they find it there.
    `offset`: of a fetch, of an upload and of the offload of a gradient, where its buffer lies in the region of the
    memory that the bytes go to; None: it takes none.
    """

    kind: EventKind
    tile: Natural
    operator: int
    for_backward: bool = False
    resident: bool = False
    offset: Natural | None = None


@dataclass(frozen=True)
class Operator:
    """A compute region.

    Attributes:
        label: what it computes, in few words.
        nodes: how many graph nodes that takes.
        flops: of its matrix products, convolutions and attention.
        product_bytes: of memory that these read and write.
        other_bytes: of memory that its other nodes read and write.
        dtype: of most of its flops; None where there are none.
        kernels: how many a device is given for it, one after the other.
        values: bytes of values that it computes with at most, besides tiles, what was saved and what is.
    """

    index: Natural
    label: str
    nodes: Natural
    flops: Natural = 0
    product_bytes: Natural = 0
    other_bytes: Natural = 0
    dtype: torch.dtype | None = None
    kernels: Natural = 0
    values: Natural = 0


@dataclass(frozen=True)
class GraphSchedule:
    """Operators and events of one graph, in execution order.

    `tiles`: what events refer to by index; the graphs of a step have the same. `has_own_memory`: whether what computes
    has memory of its own, to which tiles are copied.
    """

    kind: GraphKind
    tiles: tuple[Tile, ...]
    operators: tuple[Operator, ...]
    events: tuple[Event, ...]
    has_own_memory: bool = False

    def at(self, operator: int, kind: EventKind | None = None) -> list[Event]:
        """The events of one operator (PROLOGUE: before the first), optionally of one kind."""
        return [event for _, event in self.numbered(operator) if kind in (None, event.kind)]

    def numbered(self, operator: int) -> list[tuple[int, Event]]:
        """The events of one operator, each with its number among all."""
        return self._by_operator.get(operator, [])

    @cached_property
    def _by_operator(self) -> dict[int, list[tuple[int, Event]]]:
        by_operator: dict[int, list[tuple[int, Event]]] = {}
        for number, event in enumerate(self.events):
            by_operator.setdefault(event.operator, []).append((number, event))
        return by_operator


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of a parameter that a chunk updates.

    Attributes:
        tile: index of the parameter's tile, the first of several.
        start, count: which they are of the elements that this rank updates.
        member: the parameter's number in a pack.
    """

    tile: Natural
    start: Natural
    count: Natural
    member: Natural = 0


@dataclass(frozen=True)
class PlannedChunk:
    """What the optimizer updates at a time, in one place: on the device where states live there, else on the CPU."""

    slices: tuple[Slice, ...]
    on_device: bool = False


@dataclass(frozen=True)
class UpdateEvent:
    """One step of a chunk's update: what it needs is read, it is updated, what changed is written.

    `prefetched`: of a read, that backward starts it for the step that follows, without the gradients. `offset`: of a
    read and of an update that reads nothing, where the chunk's buffer lies in the host region; None: it takes none.
    """

    kind: UpdateKind
    chunk: Natural
    prefetched: bool = False
    offset: Natural | None = None


@dataclass(frozen=True)
class UpdateSchedule:
    """The optimizer's step that follows a plan's graphs: its chunks, and its events in the order in which the program
    comes to them. Each happens as soon as what it needs is there: the update before it, its reads, its place."""

    chunks: tuple[PlannedChunk, ...] = ()
    events: tuple[UpdateEvent, ...] = ()


@dataclass(frozen=True)
class MemoryRegions:
    """How many bytes a plan's transfer buffers take of each memory, in one piece.

    Attributes:
        host, device: the largest end of any buffer there. So much is set apart for them: of the host arena, and of the
            memory of a device that has its own.
        chunks: of `host`, the first bytes that the buffers of the optimizer's step may take.
        chunk_elements: of a chunk of the optimizer's step, for which that is enough; 0: there is no step.
        chunk_count: how many chunks are in it at a time: under update, being read, and being written.
    """

    host: Natural = 0
    device: Natural = 0
    chunks: Natural = 0
    chunk_elements: Natural = 0
    chunk_count: Natural = CHUNKS
