"""Build a plan's event graph: the jobs by which one rank computes and moves in a step, and what each must wait for.

An operator computes when the operator before it is done and its tiles are there. The program starts an operator's
transfers when it comes to the operator, so they run beside it; a reduce-scatter starts when the operator has computed
the gradient. What is in memory already is not moved: it has no job, and nothing waits for it. All ranks do the same at
the same time.

Where the program computes on processors that the disk needs, too, starting the disk's transfers takes time, which the
next compute job takes longer.

The optimizer reads, updates and writes its states in chunks. Where its step overlaps, a step begins with the
optimizer's step of the step before, and the forward pass waits for each parameter that it uses; where there is room,
the backward pass reads the first chunks of the next one. An optimizer that steps in backward begins with each chunk
when its gradients are whole. It updates on the host, beside compute, where a device has memory of its own, and else on
the processors that compute.

A loop that accumulates gradients runs the graphs once per micro-batch. From the second backward pass on, a gradient is
added to what the passes before left, which is brought to where the gradient was computed; the program waits for that.

The graph is a list of jobs, each with the indices of the jobs before it that it waits for, so it is in topological
order as it is made. As a networkx DiGraph, the 11 thousand jobs and 26 thousand edges of a trillion parameters' step
take 11 MB beside 4 MB of jobs; walking it takes 35 ms more, and the critical path 100 ms in place of 1.
Dependencies alone don't have that path: it also leads through what kept a resource busy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from zinf_fx.adam import UpdateForm
from zinf_fx.config import Tier
from zinf_fx.errors import PlanError
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.lifetimes import TRANSFERS, LiveRange
from zinf_fx.plan.memory.accounting import (
    bytes_read,
    bytes_stored,
    gradient_copied,
    in_blocks,
    prefetched_gradient_buffers,
)
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import (
    PROLOGUE,
    Event,
    EventKind,
    GraphKind,
    PlannedChunk,
    Tile,
    UpdateEvent,
    UpdateSchedule,
)
from zinf_fx.plan.simulation.communication import (
    all_gathered,
    reduced_in_group,
    reduced_over_groups,
    refreshed,
    refreshed_tiles,
)
from zinf_fx.plan.update import ChunkCost, can_be_consumed_in_place, cost_of, names_in, update_of

Resource = Literal["compute", "host", "link", "upload", "download", "disk"]
RESOURCES: tuple[Resource, ...] = ("compute", "host", "link", "upload", "download", "disk")

# Seconds of each operator of each graph.
Compute = Mapping[tuple[GraphKind, int], float]


@dataclass(frozen=True)
class Job:
    """A job takes seconds of one resource, once the jobs that it waits for are done.

    Attributes:
        name: what is done (an event's kind, "refresh", "write", a graph's kind, of a gradient that is added to "read"
            and "add", or of the optimizer "read_states", "update", "write_states") and with what (a tile's label, the
            number of an operator or of a chunk).
        after: the indices of the jobs that it waits for.
        nbytes: bytes that it moves.
        load: the share of its speed, 0 to below 1, that compute loses while the job runs.
        blocks: how many blocks of the disk it consists of.
        parameters: the names of the parameters of the optimizer's chunk.
    """

    name: str
    resource: Resource
    seconds: float
    after: tuple[int, ...] = ()
    nbytes: int = 0
    load: float = 0.0
    blocks: int = 1
    parameters: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Return what is done: the first word of the name."""
        return self.name.partition(" ")[0]

    @property
    def subject(self) -> str:
        """Return what it is done with: the rest of the name."""
        return self.name.partition(" ")[2]


def event_graph(
    plan: Plan,
    hardware: Hardware,
    compute: Compute,
    overlap: bool = True,
    accumulate: int = 1,
    in_backward: bool = False,
) -> list[Job]:
    """Return the jobs of a step in its steady state, in the order in which the program comes to them.

    Args:
        compute: seconds of every operator.
        overlap: the optimizer's step goes on in the next forward pass.
        accumulate: how often the graphs run, one time after the other, before the optimizer's step.
        in_backward: the optimizer updates each parameter when its gradient is whole, and the step ends with that,
            whatever `overlap` says.

    Raises: PlanError where the plan is for another number of ranks or has owners, where an operator has no seconds, or
    where the optimizer is to step in each of several backward passes.
    """
    if in_backward and accumulate > 1:
        raise PlanError(
            f"a step in backward has one backward pass, and {accumulate} are to be accumulated: leave one of both out"
        )
    if plan.world_size != hardware.ranks:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks and {hardware.name} has {hardware.ranks}: "
            "plan for as many, or describe a machine with as many"
        )
    if any(tile.owned for graph in plan.graphs for tile in graph.tiles):
        raise PlanError(
            "with partition='owner' each rank does something else: only steps in which all do the same are simulated"
        )
    goes_on = overlap and not in_backward
    builder = _Builder(plan, hardware, compute, in_backward, goes_on=goes_on)
    if goes_on:
        builder.add_optimizer()
    for before in range(accumulate):
        for number in range(len(plan.graphs)):
            builder.add_graph(number, adds=before > 0)
    if not goes_on:
        builder.add_optimizer()
    return builder.jobs


@dataclass
class _Adding:
    """The state of a backward pass that adds gradients to those of earlier passes.

    Attributes:
        after: `prefetched_gradient_buffers` of the graph.
        programs: the jobs that the program had come to when each gradient left for NVMe.
        written: by a tile's label, the jobs that wrote its gradient in this pass.
    """

    after: list[int | None]
    programs: list[tuple[int, ...]] = field(default_factory=list)
    written: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class _Chunk:
    """A chunk of the optimizer's step, with its events in their order.

    Attributes:
        names: the names of its parameters' tiles.
        ends: the names of the tiles of which it has the last elements.
        forms: for each slice, its elements, what its update computes from and to, and the bytes of its states.
        updated: the chunk whose update comes before its read; None: there is none.
        replaced: the chunk that was last in its place; None: there is none.
        prefetched: whether what it needs besides gradients is read in the backward pass before.
    """

    on_device: bool
    cost: ChunkCost
    names: tuple[str, ...]
    forms: list[tuple[int, UpdateForm, int]]
    ends: list[str] = field(default_factory=list)
    events: list[UpdateEvent] = field(default_factory=list)
    updated: int | None = None
    replaced: int | None = None
    prefetched: bool = False


def _chunks(plan: Plan, step: UpdateSchedule, in_place: bool) -> list[_Chunk]:
    """Return the chunks of a step, and what they wait for. `in_place`: gradients that can be are consumed in place."""
    chunks = [
        _Chunk(chunk.on_device, cost_of(plan, chunk, in_place), names_in(plan, chunk), _forms(plan, chunk))
        for chunk in step.chunks
    ]
    for name, number in {name: number for number, chunk in enumerate(chunks) for name in chunk.names}.items():
        chunks[number].ends.append(name)
    updated: int | None = None
    latest: dict[int, int] = {}  # by offset, the chunk that was written from there
    places = {event.chunk: event.offset for event in step.events if event.offset is not None}
    for event in step.events:
        chunk, place = chunks[event.chunk], places.get(event.chunk)
        chunk.prefetched |= event.prefetched
        if not event.prefetched:
            chunk.events.append(event)
        if event.kind == "read_states" and not event.prefetched:
            chunk.updated, chunk.replaced = updated, None if place is None else latest.get(place)
        elif event.kind == "update":
            updated = event.chunk
            if place is not None:
                latest[place] = event.chunk
    return chunks


def _forms(plan: Plan, chunk: PlannedChunk) -> list[tuple[int, UpdateForm, int]]:
    states = [(part.count, plan.tiles[part.tile].states) for part in chunk.slices]
    return [(count, of_tile.form, count * sum(of_tile.bytes_each)) for count, of_tile in states]


class _Builder:
    """Build the list of jobs, and keep the indices that later jobs wait for."""

    def __init__(self, plan: Plan, hardware: Hardware, compute: Compute, in_backward: bool, *, goes_on: bool) -> None:
        """`goes_on`: the optimizer's step goes on in the next forward pass."""
        self.jobs: list[Job] = []
        self._plan, self._hardware, self._compute = plan, hardware, compute
        self._program: tuple[int, ...] = ()  # the jobs that the program has come to last
        self._bringing: dict[LiveRange, tuple[int, ...]] = {}  # by live range, the job that brings its tile
        self._brought: dict[int, tuple[int, ...]] = {}  # by tile, the job that brought it last
        self._gradient_jobs: dict[str, tuple[int, ...]] = {}  # by a tile's label, the jobs that moved its gradient last
        self._offloaded: list[int] = []  # the jobs that moved activations last
        self._adding: _Adding | None = None  # None where there are no gradients of passes before
        self._started = 0  # how many transfers of the disk were started since the last compute job
        self._step = plan.update if goes_on else update_of(plan, in_backward=in_backward, prefetch=False)
        self._chunks = _chunks(plan, self._step, in_backward and hardware.unified)
        self._begun = 0  # how many chunks were begun, where the optimizer steps in backward
        # The chunks of the next step that backward reads from, in order: at most one at each operator.
        operators = sum(len(graph.operators) for graph in plan.graphs if graph.kind == "backward")
        self._early = [event.chunk for event in self._step.events if event.prefetched][:operators]
        self._read_before = frozenset(self._early)  # the chunks of this step that the backward pass before read from
        # By the numbers of chunks, the jobs that read, updated and wrote them.
        self._reads: dict[int, tuple[int, ...]] = {}
        self._updates: dict[int, tuple[int, ...]] = {}
        self._writes: dict[int, tuple[int, ...]] = {}
        # Where the optimizer steps in backward: by a parameter's name, how many of its gradients are to be offloaded
        # yet, and the jobs of those that are.
        self._in_backward = in_backward
        offloads = (plan.tiles[e.tile].name for graph in plan.graphs for e in graph.events if e.kind == "offload")
        self._awaited = Counter(offloads if in_backward else ())
        self._whole: defaultdict[str, tuple[int, ...]] = defaultdict(tuple)
        # By a parameter's name, the last jobs that update it, and that write it.
        self._updated: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._stale = {tile.label for tile in refreshed_tiles(plan)}  # updated by other ranks in part, and not here yet

    def add_graph(self, number: int, adds: bool = False) -> None:
        """Add the operators of a graph, and the transfers that start with them. `adds`: there are gradients already,
        which those of this graph are added to."""
        graph, lifetimes = self._plan.graphs[number], self._plan.lifetimes
        self._adding = _Adding(prefetched_gradient_buffers(self._plan, graph)) if adds else None
        if graph.kind == "backward":  # it begins when the activations that left are where they live
            self._program = (*self._program, *self._offloaded)
            self._offloaded = []
        apart = max(len(graph.operators) // max(len(self._early), 1), 1)
        for operator in (PROLOGUE, *(computing.index for computing in graph.operators)):
            computed: list[Event] = []
            waits: list[int] = []
            for position, event in graph.numbered(operator):
                live_range = lifetimes.live_range_of(number, position)
                if event.kind == "wait":
                    waits += () if live_range is None else self._bringing.get(live_range, ())
                elif event.kind in TRANSFERS:
                    if live_range is not None and not live_range.is_under_way(event.kind, number):
                        self._bring(event.kind, live_range, graph.tiles[event.tile])
                elif event.kind == "offload" and not any(earlier.tile == event.tile for earlier in computed):
                    self._offload(graph.tiles[event.tile])  # an earlier operator computed the gradient
                elif event.kind != "release":
                    computed.append(event)
            if operator != PROLOGUE:
                self._operator(graph.kind, operator, waits)
                if graph.kind == "backward" and operator % apart == 0 and self._early:
                    self._read_early()
            for event in computed:
                tile = graph.tiles[event.tile]
                if event.kind == "reduce_scatter":
                    self._reduce(tile)
                elif event.kind == "offload":
                    self._offload(tile)
                else:
                    written = bytes_stored(tile)
                    job = self._move_to_tier(tile, tile.tier, tile.held_nbytes, written, self._program)
                    self._offloaded.append(job)

    def add_optimizer(self) -> None:
        """Add the remaining chunks of Adam's step, which begin when all gradients are there."""
        gradients = (*self._program, *(job for jobs in self._gradient_jobs.values() for job in jobs))
        for event in self._step.events:
            is_read = event.prefetched and event.chunk in self._read_before
            if event.chunk >= self._begun and not is_read:
                self._update(event, gradients)

    def _update(self, event: UpdateEvent, gradients: tuple[int, ...]) -> None:
        """Add an event of the optimizer's step. `gradients`: the jobs that end before its chunk is read, or updated."""
        number, chunk, cost = event.chunk, self._chunks[event.chunk], self._chunks[event.chunk].cost
        names = chunk.names
        if event.kind == "read_states":
            without_gradients = cost.read - cost.gradients
            nbytes = without_gradients if event.prefetched else cost.gradients if chunk.prefetched else cost.read
            before = self._updates[chunk.updated] if chunk.updated is not None else gradients
            before += gradients if self._in_backward else ()
            before += self._writes[chunk.replaced] if chunk.replaced is not None else ()
            if nbytes:
                seconds = self._disk(nbytes, 0)
                job = self._add(f"read_states {number}", "disk", seconds, before, nbytes, parameters=names)
                before = (job,)
            self._reads[number] = (*self._reads.get(number, ()), *before)
        elif event.kind == "update":
            before = self._reads.get(number, gradients if number == 0 or self._in_backward else ())
            last = self._updates.get(number - 1, ())
            resource, seconds = self._updated_by(chunk)
            job = self._add(f"update {number}", resource, seconds, (*last, *before), cost.states, parameters=names)
            self._updates[number] = self._writes[number] = (job,)
            self._updated |= dict.fromkeys(chunk.ends, ((job,), (job,)))
        else:
            updated, write = self._updates[number], self._disk(0, cost.written)
            job = self._add(
                f"write_states {number}", "disk", write, updated, cost.written, writes=True, parameters=names
            )
            self._writes[number] = (job,)
            self._updated |= dict.fromkeys(chunk.ends, (updated, (job,)))

    def _update_what_is_whole(self, tile: Tile) -> None:
        """Count a gradient that was offloaded, and update the chunks whose gradients are all there: the optimizer steps
        in backward."""
        self._awaited[tile.name] -= 1
        self._whole[tile.name] += self._gradient_jobs.get(tile.label, self._program)
        for number in range(self._begun, len(self._chunks)):
            chunk = self._chunks[number]
            if any(self._awaited[name] for name in chunk.names):
                break
            gradients = tuple(job for name in chunk.names for job in self._whole[name])
            for event in chunk.events:
                self._update(event, gradients)
            self._begun = number + 1

    def _read_early(self) -> None:
        """Read what the next step needs, besides gradients, of its first chunk that isn't read yet."""
        number = self._early.pop(0)
        nbytes = self._chunks[number].cost.read - self._chunks[number].cost.gradients
        self._add(f"read_states {number}", "disk", self._disk(nbytes, 0), self._program, nbytes)

    def _updated_by(self, chunk: _Chunk) -> tuple[Resource, float]:
        """Return the resource that updates a chunk, and its seconds."""
        hardware = self._hardware
        if chunk.on_device and not hardware.unified:
            return "compute", hardware.device.seconds(chunk.cost.states, chunk.cost.states)
        seconds = sum(
            elements / rate if (rate := hardware.updates.get(form)) else hardware.host.seconds(nbytes, nbytes)
            for elements, form, nbytes in chunk.forms
        )
        return "compute" if hardware.unified else "host", seconds * hardware.ranks_per_node

    # -- one event -----------------------------------------------------------------------------------------------------

    def _operator(self, graph: GraphKind, operator: int, waits: list[int]) -> None:
        if (graph, operator) not in self._compute:
            raise PlanError(f"operator {operator} of the {graph} graph has no seconds to simulate it with")
        seconds = self._compute[graph, operator]
        self._program = (self._add(f"{graph} {operator}", "compute", seconds, (*self._program, *waits)),)

    def _bring(self, kind: EventKind, live_range: LiveRange, tile: Tile) -> None:
        """Add one stage of a tile's way to the device, after the stage before it."""
        before = self._bringing.get(live_range, ())
        if kind == "fetch":
            before = self._brought.get(live_range.tile, ()) if live_range.found == "held" else self._final(tile)
            if tile.label in self._stale and (seconds := self._within(tile, refreshed(tile))):
                self._stale.remove(tile.label)
                after = (*self._program, *before)
                before = (self._add(f"refresh {tile.label}", "link", seconds, after, tile.nbytes),)
        resource, seconds, nbytes = self._transfer(kind, tile)
        if seconds and live_range.moves(kind):
            before = (self._add(f"{kind} {tile.label}", resource, seconds, (*self._program, *before), nbytes),)
        self._bringing[live_range] = self._brought[live_range.tile] = before

    def _final(self, tile: Tile) -> tuple[int, ...]:
        """Return the jobs after which a tile's parameter can be read. The program goes on when it is updated."""
        updated, written = self._updated.get(tile.name, ((), ()))
        self._program = (*self._program, *updated)
        return written if tile.tier == "nvme" else ()

    def _transfer(self, kind: EventKind, tile: Tile) -> tuple[Resource, float, int]:
        """Return the resource of a stage of a tile's way, its seconds, and the bytes that it moves."""
        if kind == "fetch":
            read = bytes_read(tile)
            return "disk", self._disk(read, 0), read
        if kind == "upload":
            moves = tile.tier != "device" and not self._hardware.unified
            return "upload", self._hardware.upload.seconds(tile.held_nbytes) if moves else 0.0, tile.held_nbytes
        return "link", self._within(tile, all_gathered(tile)), tile.nbytes

    def _within(self, tile: Tile, nbytes: int) -> float:
        """Return the seconds of a collective of the ranks that divide a tile among themselves."""
        return self._hardware.link_within(tile.ranks).seconds(nbytes)

    def _reduce(self, tile: Tile) -> None:
        """Reduce the tile's gradient, which the last operator computed."""
        self._gradient_jobs[tile.label] = self._program
        seconds = self._within(tile, reduced_in_group(self._plan, tile))
        seconds += self._hardware.link_across(tile.ranks).seconds(reduced_over_groups(self._plan, tile))
        if seconds:
            job = self._add(f"reduce_scatter {tile.label}", "link", seconds, self._program, tile.nbytes)
            self._gradient_jobs[tile.label] = (job,)

    def _offload(self, tile: Tile) -> None:
        """Offload a gradient to its tier. A device that computes in host memory copies it in any case."""
        if tile.gradient_tier is None:
            return
        copied = gradient_copied(self._plan, tile)
        stored = in_blocks(tile, tile.gradient_nbytes(self._plan.stage))
        if self._adding is not None:
            self._add_to_gradient(tile, copied, stored)
        consumed = self._in_backward and self._hardware.unified and can_be_consumed_in_place(tile)
        if not consumed and (tile.gradient_tier != "device" or self._hardware.unified):
            after = (*self._program, *self._gradient_jobs.get(tile.label, ()))
            self._gradient_jobs[tile.label] = (self._move_to_tier(tile, tile.gradient_tier, copied, stored, after),)
        if self._adding is not None and tile.gradient_tier == "nvme":
            self._adding.programs.append(self._program)
            self._adding.written[tile.label] = self._gradient_jobs[tile.label]
        if self._in_backward:
            self._update_what_is_whole(tile)

    def _add_to_gradient(self, tile: Tile, nbytes: int, stored: int) -> None:
        """Bring what earlier passes left of a gradient to where the new one was computed, and add the two: in host
        memory, that reads once more than copying the gradient does."""
        hardware, after = self._hardware, (*self._program, *self._gradient_jobs.get(tile.label, ()))
        if tile.gradient_tier == "nvme":
            adding, read_after = self._adding, after
            assert adding is not None
            if (early := adding.after[len(adding.programs)]) is not None:
                read_after = (*adding.programs[early], *adding.written.get(tile.label, ()))
            after = (*after, self._add(f"read {tile.label}", "disk", self._disk(stored, 0), read_after, stored))
        if tile.gradient_tier != "device" and not hardware.unified:
            after = (self._add(f"upload {tile.label}", "upload", hardware.upload.seconds(nbytes), after, nbytes),)
        memory = hardware.host if hardware.unified else hardware.device
        read = nbytes if hardware.unified else 2 * nbytes
        written = 0 if hardware.unified else nbytes
        self._program = (self._add(f"add {tile.label}", "compute", memory.seconds(read, written), after, nbytes),)

    def _move_to_tier(self, tile: Tile, tier: Tier, nbytes: int, stored: int, after: tuple[int, ...]) -> int:
        """Offload `nbytes` to host memory, where a device that computes there copies them, and on to the disk, where
        they take `stored` bytes."""
        hardware = self._hardware
        if hardware.unified:
            job = self._add(f"offload {tile.label}", "compute", hardware.host.seconds(nbytes, nbytes), after, nbytes)
            self._program = (job,)
        else:
            job = self._add(f"offload {tile.label}", "download", hardware.download.seconds(nbytes), after, nbytes)
        if tier == "nvme":
            job = self._add(f"write {tile.label}", "disk", self._disk(0, stored), (job,), stored, writes=True)
        return job

    def _disk(self, read: int, written: int) -> float:
        """Return the seconds that bytes take on this rank's share of the node's drives."""
        return self._hardware.nvme.seconds(read, written) * self._hardware.ranks_per_node

    def _add(
        self,
        name: str,
        resource: Resource,
        seconds: float,
        after: tuple[int, ...],
        nbytes: int = 0,
        writes: bool = False,
        parameters: tuple[str, ...] = (),
    ) -> int:
        """Append a job, and return its index. `writes`: a job of the disk writes, and doesn't read."""
        disks, load = self._hardware.nvme, 0.0
        blocks = disks.blocks(nbytes) if resource == "disk" else 1
        if resource == "disk" and self._hardware.unified:
            load = disks.write_load if writes else disks.read_load
            self._started += 1
        elif resource == "compute":
            seconds += self._started * disks.start
            self._started = 0
        self.jobs.append(Job(name, resource, seconds, tuple(dict.fromkeys(after)), nbytes, load, blocks, parameters))
        return len(self.jobs) - 1
