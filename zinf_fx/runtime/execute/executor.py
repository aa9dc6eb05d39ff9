"""Runs planned graphs: each is plain generated Python that calls its `Run` between compute nodes."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zinf_fx import cuda, ops
from zinf_fx.interrupts import INTERRUPTS, let_through, sealed
from zinf_fx.plan.memory.use import room_on_device
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphKind, Tile
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.execute.activations import ActivationSlots
from zinf_fx.runtime.execute.anomaly import looks_for_nan
from zinf_fx.runtime.execute.binding import Here, bind, prologue_fetches
from zinf_fx.runtime.execute.inductor import CompiledRegion
from zinf_fx.runtime.execute.inputs import Inputs, SettledValues
from zinf_fx.runtime.execute.order import CollectiveOrder
from zinf_fx.runtime.execute.tile_cache import TileCache
from zinf_fx.runtime.execute.tiles import InFlightTile
from zinf_fx.runtime.finalizers import run_interrupted_finalizers
from zinf_fx.runtime.gradients.backward import BackwardGradients, PlannedGradients
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.memory.process import computed, holds_little
from zinf_fx.runtime.ranks import ALONE, Ranks
from zinf_fx.runtime.recorder import RECORDER, Note
from zinf_fx.runtime.tensor.pending_gradient import PendingGradient
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tile import StoredTile
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import blocks


class Stage:
    """A recurring part of a training loop: a graph, or an optimizer's step. Which stage follows it is learned.

    `anticipated` are the tiles that were fetched for the stage's next run before it began. They go with the stage, so
    that a tile fetched in advance doesn't prolong the life of a model.
    """

    starts_successor = True

    def __init__(self) -> None:
        self._successor: weakref.ref[Stage] | None = None
        self.anticipated: list[InFlightTile] = []
        weakref.finalize(self, EXECUTOR.tiles.leave, self.anticipated).atexit = False

    @property
    def successor(self) -> Stage | None:
        """The stage that followed this one last time."""
        return self._successor and self._successor()

    @successor.setter
    def successor(self, stage: Stage) -> None:
        self._successor = weakref.ref(stage)

    def head_tiles(self) -> list[tuple[StoredTile, Tile, int | None]]:
        """What the stage fetches first, as far as its last run tells: from where, and to which offset."""
        return []


class Program(Stage):
    """One planned graph, bound to the executor. Called with a list of arguments, which it empties as it goes.

    `tokens` are the placeholders that carry the tokens of the schedule's tiles, in their order. The storages are
    resolved from the tokens of each call, so one program serves every layer that shares its graph. What stays in memory
    stays for one such layer.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        plan: Plan,
        kind: GraphKind,
        tokens: Sequence[str],
        operators: Mapping[str, int],
        tensor_ranks: Ranks = ALONE,
        left_alone: Mapping[int, int] = MappingProxyType({}),
        regions: Mapping[str, CompiledRegion] = MappingProxyType({}),
        gradients: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`operators`: by the names of the nodes that compute, which operator they belong to. `tensor_ranks`: over
        which activations are divided. `left_alone`: the tiles whose gradients may be kept as they are computed, and
        the positions that these have among the results of backward. `regions`: by the names of the nodes that stand
        for several operations, what computes them. `gradients`: by position among the results, whose they are."""
        super().__init__()
        self.plan = plan
        self.schedule = schedule = plan.graph(kind)
        # A forward graph starts the head of its backward graph by itself, as its plan says.
        self.starts_successor = schedule.kind != "forward"
        placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
        # Those of activations that leave are made as the graph runs.
        used = {event.tile for event in schedule.events}
        positions = [
            placeholders.index(token) if tile in used and token in placeholders else None
            for tile, token in enumerate(tokens)
        ]
        self._gradients = {result: placeholders.index(token) for result, token in gradients.items()}
        packs = module.graph.find_nodes(op="call_function", target=ops.pack)
        self._packed = {tokens.index(pack.name): [placeholders.index(t.name) for t in pack.args[0]] for pack in packs}
        self.inputs = Inputs(schedule.tiles, positions, self._packed)
        leaving = module.graph.find_nodes(op="call_function", target=ops.offload_activation)
        devices = {n.meta[ops.EVENT].tile: n.args[0].meta["val"].device for n in leaving}
        self.slots = ActivationSlots(plan, devices, tensor_ranks)
        writes = [e for graph in plan.graphs for e in graph.events if e.kind in ("offload_activation", "write")]
        to_nvme = any(schedule.tiles[event.tile].tier == "nvme" for event in writes)
        self._room_on_device = room_on_device(plan)
        self.awaits_writes = schedule.kind != "forward" and to_nvme
        self._graph, self._left_alone, self._regions = (module, schedule.tiles, operators), left_alone, regions
        self._bound: dict[Here, fx.GraphModule] = {}
        self._module: fx.GraphModule | None = None  # for the storages of the last run
        self._here: Here | None = None  # with them
        self._head = prologue_fetches(schedule)
        self.moved: list[int] = []  # the tiles of parameters that aren't where the graph computes
        self.gathered: list[tuple[int, int]] = []  # tiles, and bytes of such values with the tiers of each
        self.planned_gradients = PlannedGradients(plan, schedule)
        self._order = CollectiveOrder(plan, kind)
        self._places_updates = bool(plan.update.chunks)

    def __call__(self, arguments: list) -> tuple:
        with RUNNING.turn():
            return self._run(arguments)

    def _run(self, arguments: list) -> tuple:
        storages, tiers, same = self.inputs.find(arguments)
        followed: set[TensorStorage] = set()
        if PendingGradient.any_followed:
            members = (member for tile in self.inputs.parameters for member in storages[tile].members)
            followed = {member for member in members if member.gradient.followed}
        if not same:
            EXECUTOR.tiles.drop_staying()
        searches_for_nan = self.schedule.kind == "backward" and looks_for_nan()
        asked = bool(followed), searches_for_nan
        here = self._here
        if self._module is None or here is None or not same or (here.followed, here.searches_for_nan) != asked:
            self._bind_to({tile: storages[tile] for tile in self.inputs.parameters}, *asked)
        EXECUTOR.begin(self, self.plan, storages)
        RECORDER.graph_begins(self.plan, self.schedule.kind)
        run = Run(self, storages, tiers)
        if self.schedule.has_own_memory:
            run.device.leave_room(self._room_on_device)
        if self.schedule.kind == "forward":
            for storage in followed:
                storage.gradient.backwards_due += 1
        tokens = {position: arguments[number] for position, number in self._gradients.items()}
        arguments.reverse()
        try:
            run.await_writes()
            if not self._order.is_common(storages, EXECUTOR.tiles, run.gradients, self.successor is not None):
                self._successor = None  # this run starts nothing for it
                EXECUTOR.drop_anticipated()
            assert self._module is not None
            results = self._module(run, arguments)
        except BaseException as error:
            run.abort(error)
            if self.schedule.kind == "forward":  # no backward pass comes of it
                for storage in followed:
                    storage.gradient.backward_ended()
            raise
        results = run.end(results, tokens)
        EXECUTOR.end(self)
        return results

    def _bind_to(self, parameters: Mapping[int, StoredTile], followed: bool, searches_for_nan: bool) -> None:
        """Have the graph for parameters of which some may be where it computes, with no other rank to change them.
        `followed`: whether an optimizer steps in backward; `searches_for_nan`: see `Here`."""
        in_place = {t: s for t, s in parameters.items() if s.in_place and s.ranks.shards == 1}
        with_plain_gradients = () if followed else (t for t, s in in_place.items() if s.has_plain_gradient)
        plain = frozenset(tile for tile in with_plain_gradients if self.schedule.tiles[tile].rows is None)
        left_alone = plain.intersection(self._left_alone)
        kept = frozenset(
            tile for tile in left_alone if parameters[tile].first.config.own_placement.gradients == "device"
        )
        self._here = Here(frozenset(in_place), plain, kept, followed, searches_for_nan)
        if self._here not in self._bound:
            self._bound[self._here] = bind(*self._graph, self._here, self._left_alone, self._regions)
        self._module = self._bound[self._here]
        if self._places_updates:
            self._places_updates = False
            self._place_updates(parameters)
        waits = [event.tile for event in self.schedule.events if event.kind == "wait" and event.tile in in_place]
        self.inputs.values = {tile: parameters[tile].values for tile in waits}
        self.moved = [tile for tile in parameters if tile not in in_place]
        first: dict[int, int] = {}  # tile of those that share their tiers
        nbytes: Counter[int] = Counter()
        for tile in waits:
            nbytes[first.setdefault(id(parameters[tile].tiers), tile)] += self.schedule.tiles[tile].nbytes
        self.gathered = list(nbytes.items())

    def _place_updates(self, parameters: Mapping[int, StoredTile]) -> None:
        """Have the optimizer update parameters in the order of the plan's update, and those of a tile in the one in
        which they are stored. They exchange their places among them, so that those of other graphs stay where they
        are."""
        tiles = self.plan.tiles
        stored = {tiles[number].name: tile for number, tile in parameters.items()}
        names = dict.fromkeys(tiles[part.tile].name for chunk in self.plan.update.chunks for part in chunk.slices)
        members = (stored[name].members for name in names if name in stored)
        ordered = [storage for of_tile in members for storage in sorted(of_tile, key=attrgetter("place"))]
        places = sorted(storage.place for storage in ordered)
        for storage, place in zip(ordered, places, strict=True):
            storage.place = place

    @property
    def is_followed(self) -> bool:
        """Whether somebody is to know when a run has used a parameter."""
        return self._here is not None and self._here.followed

    def head_tiles(self) -> list[tuple[StoredTile, Tile, int | None]]:
        next_tiles = ((self.inputs.last(tile), self.schedule.tiles[tile], offset) for tile, offset in self._head)
        return [(storage, tile, offset) for storage, tile, offset in next_tiles if storage is not None]


class Executor:
    """Tiles in flight across graphs, and the order in which the stages of the training loop follow each other.

    Whoever calls it holds `RUNNING.lock`; see [Note: threads].

    The order is learned: when a stage ends, the head of the graph that followed it last time is fetched. A wrong guess
    costs a few reads, and is dropped when the next graph has begun. What an optimizer's step is about to change is not
    fetched before: the step is a stage too.
    """

    def __init__(self) -> None:
        self.tiles = TileCache()
        self._previous: weakref.ref[Stage] | None = None
        self._expected: weakref.ref[Stage] | None = None  # the one stage for which tiles were fetched in advance

    def begin(self, stage: Stage, plan: Plan | None = None, storages: Sequence[StoredTile] = ()) -> None:
        """A stage begins: a graph of `plan`, with tiles of `storages`, or an optimizer's step."""
        if plan is None:
            RECORDER.step_ends()
        else:
            self.tiles.stay_for(plan, storages)
        previous = self._previous and self._previous()
        if previous is not None:
            previous.successor = stage
        self._previous = weakref.ref(stage)

    def end(self, stage: Stage) -> None:
        """A stage ended: start the head of the one that is expected next."""
        successor = stage.successor
        if successor is not None and stage.starts_successor:
            for storage, tile, offset in successor.head_tiles():
                self.anticipate(successor, storage, tile, offset)

    def anticipate(self, stage: Stage, storage: StoredTile, tile: Tile, offset: int | None) -> None:
        """Fetch a tile that `stage`, expected to come next, will need at its head."""
        if self._expected is None or self._expected() is not stage:
            self.drop_anticipated()
            self._expected = weakref.ref(stage)
        if not (storage.in_place or any(member.shard.stale for member in storage.members)):  # see [Note: order]
            stage.anticipated.append(self.tiles.fetch(storage, tile, offset))

    def drop_anticipated(self) -> None:
        """Let go of what was fetched in advance; what a running graph holds by now stays."""
        expected, self._expected = self._expected and self._expected(), None
        if expected is not None:
            self.tiles.release_all(expected.anticipated)

    @sealed
    def reset(self) -> None:
        """Forget what was expected, waiting for reads under way, so that every buffer is back."""
        self.drop_anticipated()
        self.tiles.drop_staying()
        self._previous = None
        run_interrupted_finalizers()

    def _after_fork(self) -> None:
        """A child forgets the tiles, which are its parent's. Nobody in it would release the locks."""
        self.tiles.forget()
        self._previous = self._expected = None


EXECUTOR = Executor()
os.register_at_fork(after_in_child=EXECUTOR._after_fork)


class Run:
    """One execution of one graph: the tiles it holds. Its methods are the operations of `ops`.

    With the CPU as the device, host memory is device memory:
    upload moves nothing either, and `wait` returns the buffer that the disk wrote into.
    """

    def __init__(self, program: Program, storages: Sequence[StoredTile], tiers: list[Tiers]) -> None:
        """`storages`: of each tile, in `tiers`; None: of an activation that this run is to offload."""
        self._program = program
        self._tiles = program.schedule.tiles
        self._storages = storages
        self._held = [storages[tile].members for tile in program.moved]  # until the run is over
        self._tiers = tiers
        # Slots die with the model; of a graph without parameters, with its compiled code.
        self._owner: object = next((storage for storage in storages if storage is not None), program.slots)
        if program.slots:
            self._tiers = self._tiers or [Tiers.of(program.plan.config)]
            program.slots.reserve(self._owner, self._tiers[0])
        for used in self._tiers:
            used.check_process()
        # Work in the background begins in a step, or in a backward pass whose parameters are followed.
        goes_on = program.is_followed or any(used.has_work for used in self._tiers)
        self._working = self._tiers if goes_on else ()
        self._counts_results = holds_little()
        self._in_flight: dict[int, InFlightTile] = {}
        self._computing: Note | None = None  # the operator, while somebody records
        self.gradients: BackwardGradients | None = None  # of a backward graph
        if program.schedule.kind == "backward":
            known = program.planned_gradients, program.is_followed
            self.gradients = BackwardGradients(program.plan, self._tiles, storages, *known)
            self.copy_gradients = self.gradients.copy_gradients

    def end(self, results: tuple, tokens: Mapping[int, torch.Tensor]) -> tuple:
        """The graph has computed all. Returns as `BackwardGradients.end`."""
        if self.gradients is not None:
            results = self.gradients.end(results, tokens)
        for tile, nbytes in self._program.gathered:
            self._storages[tile].tiers.counters.gathered_bytes += nbytes
        return results

    def await_writes(self) -> None:
        """Before backward, until activations that left are on NVMe: what left last is needed first, and the plan has no
        room for their buffers from then on, nor for those of parameters. Raises: StoreError when a write failed."""
        if self._program.awaits_writes:
            for tiers in self._tiers:
                tiers.limit_writes(0)

    def fetch(self, tile: int, offset: int | None = None) -> None:
        """Start reading a tile."""
        self._in_flight[tile] = EXECUTOR.tiles.fetch(self._storages[tile], self._tiles[tile], offset)

    def upload(self, tile: int, offset: int | None = None) -> None:
        """Start copying a tile to the device, behind what is queued there by now."""
        EXECUTOR.tiles.upload(self._storages[tile], self._tiles[tile], offset)

    def allgather(self, tile: int) -> None:
        """Start to gather the tile's shards, once this rank's is there. One rank holds the whole tile."""
        EXECUTOR.tiles.allgather(self._storages[tile], self._tiles[tile])

    def fetch_for_backward(self, tile: int, offset: int | None = None) -> None:
        """Start reading a tile that backward begins with, once it is known that backward follows."""
        if (successor := self._program.successor) is not None:
            EXECUTOR.anticipate(successor, self._storages[tile], self._tiles[tile], offset)

    upload_for_backward = upload

    def allgather_for_backward(self, tile: int) -> None:
        """Start to gather what `fetch_for_backward` reads."""
        if self._program.successor is not None:
            self.allgather(tile)

    def wait(self, tile: int) -> list[torch.Tensor]:
        """The parameters of a tile, or the rows of one, in full."""
        with RECORDER.about(self._tiles[tile].label):
            return self._in_flight[tile].wait()

    @property
    def values(self) -> Mapping[int, list[torch.Tensor]] | SettledValues:
        """By tile, the parameters that are where the graph computes."""
        values = self._program.inputs.values
        return SettledValues(values, self._storages) if self._working else values

    def release(self, tile: int) -> None:
        """The tile's buffers are free, unless another run holds them, or they were fetched for backward."""
        EXECUTOR.tiles.release(self._in_flight.pop(tile))
        self.passed(tile)

    def keep(self, tile: int) -> None:
        """The graph is done with the tile, which stays in memory until its next fetch."""
        EXECUTOR.tiles.stay(self._in_flight.pop(tile), self._storages[tile])
        self.passed(tile)

    def passed(self, tile: int) -> None:
        """The graph has used the tile once more."""
        if self.gradients is not None:
            self.gradients.passed(tile)

    def reduce_scatter(self, tile: int, gradient: torch.Tensor | list[torch.Tensor]) -> object:
        """Start to average a gradient over the ranks. One rank's is the average. Returns what `offload` takes."""
        assert self.gradients is not None
        return self.gradients.reduce_scatter(tile, gradient)

    def offload(self, tile: int, shard: Any, offset: int | None = None) -> None:
        """Move a gradient to its tier and add it to the parameter's `.grad`, as autograd would."""
        assert self.gradients is not None
        self.gradients.offload(tile, shard, offset)

    def offload_activation(
        self, tile: int, value: torch.Tensor, stride: Sequence[int], offset: int | None = None
    ) -> torch.Tensor:
        """Move a saved activation to its tier, through `offset`; its token, which backward gets in its place.

        `stride`: as planned. A kernel may lay its result out in another way than its fake said.
        """
        if value.stride() != tuple(stride):
            value = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
        value = value.as_strided((value.numel(),), (1,))
        storage, token = self._program.slots.take(self._owner, tile, self._tiers[0])
        self._set(storage, tile, value, offset)
        return token

    def write(self, tile: int, value: torch.Tensor, offset: int | None = None) -> None:
        """Move what the graph wrote to a parameter to its tier, through `offset`."""
        (storage,) = self._storages[tile].members
        self._set(storage, tile, value, offset)

    def _set(self, storage: TensorStorage, tile: int, value: torch.Tensor, offset: int | None) -> None:
        planned = self._tiles[tile]
        if planned.tier == "nvme":
            room = self._program.plan.activation_buffer - blocks(planned.held_nbytes)
            storage.tiers.limit_writes(max(room, 0))
        with RECORDER.about(planned.label):
            storage.set(value, offset)

    def leave_prologue(self) -> None:
        """The transfers of the prologue have begun: what was fetched in advance and is not among them is not needed."""
        EXECUTOR.drop_anticipated()

    def begin_operator(self, index: int) -> None:
        """What computes from now on is of this operator. Before it, work in the background goes on."""
        if INTERRUPTS.since is not None:  # looked at here, as a call for each operator takes its time
            let_through()
        for tiers in self._working:
            tiers.advance()
        if RECORDER.log is not None:
            self._note_memory()
            label = self._program.schedule.operators[index].label
            place = self.device.torch_device
            self._computing = RECORDER.begin(self._program.schedule.kind, 0, place, label, str(index))

    def end_operator(self, nbytes: int) -> None:
        """The operator that began last has computed all, `nbytes` of it in the CPU's memory."""
        if RECORDER.log is not None:
            RECORDER.end(self._computing)
            self._note_memory()
            self._computing = None
        if self._counts_results:
            computed(nbytes)

    @property
    def device(self) -> Device:
        """Where the graph computes."""
        return next((storage.device for storage in self._storages if storage is not None), CPU)

    def _note_memory(self) -> None:
        RECORDER.holds("host", sum(tiers.host.in_use for tiers in self._tiers))
        device = self.device.torch_device
        if device.type == "cuda":
            RECORDER.holds("device", cuda.allocated_bytes(device))

    @sealed
    def abort(self, error: BaseException) -> None:
        """After `error`, which gets notes of other failures: drain the reads under way and give every buffer back.
        Half a gradient is none."""
        in_flight, self._in_flight = list(self._in_flight.values()), {}
        try:
            with ExitStack() as remaining:
                remaining.callback(EXECUTOR.reset)
                remaining.callback(EXECUTOR.tiles.release_all, in_flight)
                self.end_operator(0)
                RECORDER.step_ends()
                if self.gradients is not None:
                    self.gradients.abort(error)
        except Exception as failed:
            error.add_note(f"and then: {failed}")
