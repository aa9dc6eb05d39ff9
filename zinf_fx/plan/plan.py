"""The plan: the schedules of one captured graph, and what was decided to make them, as pure data."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from zinf_fx.config import Config, Natural, Positive
from zinf_fx.errors import PlanFileError
from zinf_fx.plan.codec import encode
from zinf_fx.plan.lifetimes import Lifetimes
from zinf_fx.plan.schedule import GraphKind, GraphSchedule, MemoryRegions, Tile, UpdateSchedule

FORMAT = "zinf_fx plan"
SCHEMA = 11
"""Version of a plan file: another one for every change of its fields, and of when a buffer is needed, by which they are
checked."""


@dataclass(frozen=True)
class Choice:
    """What backward gets of some nodes' results.

    Attributes:
        first, end: numbers of the first node and of the one after the last, in the captured graph once its parameters
            are divided.
        recomputed: whether it computes them again; else they are saved; None: the model says so.
        segment: the part of the graph that is computed again as a whole; None: of none.
        leaves: whether what is saved leaves the device; None: `Config.activations` says so for all.
    """

    first: Natural
    end: Natural
    recomputed: bool | None = None
    segment: Natural | None = None
    leaves: bool | None = None


@dataclass(frozen=True)
class Fingerprint:
    """The captured graph that a plan is for, as text.

    Attributes:
        torch, zinf_fx: the versions that made the plan.
        lines: what nodes are: an input's type, or an operation on nodes so many places before.
        nodes: of each node, in order, its line.
    """

    torch: str
    zinf_fx: str
    lines: tuple[str, ...]
    nodes: tuple[Natural, ...]

    def text(self, node: int) -> str:
        """The line of a node."""
        return self.lines[self.nodes[node]]


@dataclass(frozen=True)
class Plan:
    """The schedule of one captured graph: forward and backward, or inference alone.

    Attributes:
        gradient_buffer, activation_buffer: bytes of gradients, and of activations and new values of parameters, that
            may be on their way to NVMe at once.
        kept: bytes of activations that stay where they were computed, from forward to backward.
        unmoved: bytes of the model's buffers, and of parameters that are not stored: they are on the device throughout.
        regions: what the events' offsets lie in.
        update: the optimizer's step that follows, where the plan trains.
        tile_limit: bytes above which parameters were divided.
        choices: what is recomputed, what is saved, and what of that leaves.
        fingerprint: what the plan is for; None where it was made by hand.
    """

    graphs: tuple[GraphSchedule, ...]
    config: Config
    world_size: Positive = 1
    gradient_buffer: Natural = 0
    activation_buffer: Natural = 0
    kept: Natural = 0
    unmoved: Natural = 0
    regions: MemoryRegions = field(default_factory=MemoryRegions)
    update: UpdateSchedule = field(default_factory=UpdateSchedule)
    tile_limit: Natural | None = None
    choices: tuple[Choice, ...] = ()
    fingerprint: Fingerprint | None = None

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """What the events of all graphs refer to by index."""
        return self.graphs[0].tiles

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """What the events mean. Raises: OutOfOrder, UnfinishedLifetime."""
        return Lifetimes(self.graphs)

    @property
    def has_own_memory(self) -> bool:
        """Whether what computes has memory of its own, to which tiles are copied."""
        return any(graph.has_own_memory for graph in self.graphs)

    @property
    def stage(self) -> int:
        """The stage of ZeRO, which says what is partitioned."""
        return self.config.stage

    @property
    def replicas(self) -> int:
        """How many groups of ranks have all of the model each."""
        return max((tile.replicas for tile in self.tiles), default=1)

    def graph(self, kind: GraphKind) -> GraphSchedule:
        """The graph of one kind. Raises: KeyError when the plan has none."""
        for graph in self.graphs:
            if graph.kind == kind:
                return graph
        raise KeyError(f"the plan has no {kind} graph; it has: {', '.join(g.kind for g in self.graphs)}")

    def moves_as(self, other: Plan) -> bool:
        """Whether the same tiles move at the same operators, and through the same places in memory, as in another plan,
        whatever the operators compute on."""
        graphs = zip(self.graphs, other.graphs, strict=False)
        same_places = (self.regions, self.update) == (other.regions, other.update)
        return (
            same_places
            and len(self.graphs) == len(other.graphs)
            and all((mine.kind, mine.tiles, mine.events) == (its.kind, its.tiles, its.events) for mine, its in graphs)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, as JSON that `zinf_fx.load_plan` reads and docs/plan.schema.json describes.

        Raises: PlanFileError when the file can't be written.
        """
        text = json.dumps({"format": FORMAT, "schema": SCHEMA, **encode(self)}, separators=(",", ":"))
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise PlanFileError(f"plan file {os.fspath(path)} can't be written: {error}") from error
