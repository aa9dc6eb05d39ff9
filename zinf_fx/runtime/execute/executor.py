"""Runs planned graphs: each is plain generated Python that calls its `Run` between compute nodes."""

from __future__ import annotations

import math
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.errors import StoredTensorError
from zinf_fx.interrupts import let_through, sealed
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphKind, Tile
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.execute.activations import ActivationSlots
from zinf_fx.runtime.execute.binding import bind, head_fetches
from zinf_fx.runtime.execute.transfers import ShardedTile, StagedTile, Staging
from zinf_fx.runtime.gradients.accumulate import (
    accumulate_gradient,
    accumulate_gradient_part,
    begin_gradient,
    reduced,
    reduced_part,
    take_unreduced,
)
from zinf_fx.runtime.gradients.leaf import Leaf, leaves_of_node
from zinf_fx.runtime.gradients.reduction import Reduction
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.memory.freelist import round_up
from zinf_fx.runtime.memory.leases import PAGE
from zinf_fx.runtime.ranks import ALONE, Ranks
from zinf_fx.runtime.recorder import GRADIENT, RECORDER, Note
from zinf_fx.runtime.remains import give_back_remains
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import Tiers


class Stage:
    """A recurring part of a training loop: a graph, or an optimizer's step. Which stage follows it is learned.

    `anticipated` are the tiles that were fetched for the stage's next run before it began. They go with the stage, so
    that a tile fetched in advance doesn't prolong the life of a model.
    """

    starts_successor = True

    def __init__(self) -> None:
        self._successor: weakref.ref[Stage] | None = None
        self.anticipated: list[StagedTile | ShardedTile] = []
        weakref.finalize(self, _release_all, self.anticipated).atexit = False

    @property
    def successor(self) -> Stage | None:
        """The stage that followed this one last time."""
        return self._successor and self._successor()

    @successor.setter
    def successor(self, stage: Stage) -> None:
        self._successor = weakref.ref(stage)

    def head_tiles(self) -> list[tuple[TensorStorage, Tile, int | None]]:
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
    ) -> None:
        """`operators`: by the names of the nodes that compute, which operator they belong to. `tensor_ranks`: over
        which activations are divided."""
        super().__init__()
        self.plan = plan
        self.schedule = schedule = plan.graph(kind)
        # A forward graph starts the head of its backward graph by itself, as its plan says.
        self.starts_successor = schedule.kind != "forward"
        placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
        # Those of activations that leave are made as the graph runs.
        used = {event.tile for event in schedule.events}
        self._token_positions = [
            placeholders.index(token) if tile in used and token in placeholders else None
            for tile, token in enumerate(tokens)
        ]
        self._parameters = [
            tile.index
            for tile, position in zip(schedule.tiles, self._token_positions, strict=True)
            if position is not None and not tile.activation
        ]
        leaving = module.graph.find_nodes(op="call_function", target=ops.offload_activation)
        devices = {n.meta[ops.EVENT].tile: n.args[0].meta["val"].device for n in leaving}
        self.slots = ActivationSlots(plan, devices, tensor_ranks)
        self.awaits_activations = schedule.kind == "backward" and any(
            tile.activation and tile.tier == "nvme" for tile in schedule.tiles
        )
        self._module = bind(module, operators)
        self._head = head_fetches(schedule)
        self._last_storages: dict[int, weakref.ref[TensorStorage]] = {}  # of parameters
        # After so many events of a tile, this graph needs neither its value nor its gradient any more.
        events = [event for event in schedule.events if not schedule.tiles[event.tile].activation]
        self.last_uses = Counter(event.tile for event in events if event.kind in ("release", "offload"))
        self.gradients = Counter(event.tile for event in events if event.kind == "offload")

    @property
    def code(self) -> str:
        """The generated Python."""
        return self._module.code

    def __call__(self, arguments: list) -> tuple:
        with RUNNING.turn():
            return self._run(arguments)

    def _run(self, arguments: list) -> tuple:
        storages = [p if p is None else TensorStorage.of_token(arguments[p]) for p in self._token_positions]
        parameters = {tile: storages[tile] for tile in self._parameters}
        if {tile: ref() for tile, ref in self._last_storages.items()} != parameters:
            EXECUTOR.staging.drop_staying()
        self._last_storages = {tile: weakref.ref(storage) for tile, storage in parameters.items()}
        EXECUTOR.begin(self, self.plan)
        RECORDER.graph_begins(self.plan, self.schedule.kind)
        run = Run(self, storages)
        if self.schedule.kind == "forward":
            for storage in set(parameters.values()):
                storage.backwards_due += 1
        arguments.reverse()
        try:
            run.await_activations()
            results = self._module(run, arguments)
        except BaseException as error:
            run.abort(error)
            if self.schedule.kind == "forward":  # no backward pass comes of it
                for storage in set(parameters.values()):
                    storage.backwards_due = max(storage.backwards_due - 1, 0)
            raise
        EXECUTOR.end(self)
        return results

    def head_tiles(self) -> list[tuple[TensorStorage, Tile, int | None]]:
        if not self._last_storages:
            return []
        found = ((self._last_storages[tile](), self.schedule.tiles[tile], offset) for tile, offset in self._head)
        return [(storage, tile, offset) for storage, tile, offset in found if storage is not None]


class Executor:
    """Tiles in flight across graphs, and the order in which the stages of the training loop follow each other.

    Whoever calls it holds `RUNNING.lock`; see [Note: threads].

    The order is learned: when a stage ends, the head of the graph that followed it last time is fetched. A wrong guess
    costs a few reads, and is dropped when the next graph has begun. What an optimizer's step is about to change is not
    fetched before: the step is a stage too.
    """

    def __init__(self) -> None:
        self.staging = Staging()
        self._previous: weakref.ref[Stage] | None = None
        self._expected: weakref.ref[Stage] | None = None  # the one stage for which tiles were fetched in advance
        self._plan: weakref.ref[Plan] | None = None  # of the graph that ran last

    def begin(self, stage: Stage, plan: Plan | None = None) -> None:
        """A stage begins: a graph of `plan`, or an optimizer's step. What stays in memory stays for one plan."""
        if plan is not None and (self._plan is None or self._plan() is not plan):
            self.staging.drop_staying()
            self._plan = weakref.ref(plan)
        if plan is None:
            RECORDER.step_ends()
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

    def fetch(self, storage: TensorStorage, tile: Tile, offset: int | None) -> StagedTile | ShardedTile:
        """Hold a tile, starting to read it unless it is held; to `offset` in the region of the host arena."""
        with RECORDER.about(tile.label):
            return self.staging.fetch(storage, tile.start, math.prod(tile.shape), offset)

    def upload(self, storage: TensorStorage, tile: Tile, offset: int | None) -> None:
        """Start copying a tile that is held to the device, to `offset` in the region there."""
        with RECORDER.about(tile.label):
            self.staging.upload(storage, tile.start, math.prod(tile.shape), offset)

    def allgather(self, storage: TensorStorage, tile: Tile) -> None:
        """Start to gather the shards of a tile that is held."""
        with RECORDER.about(tile.label):
            self.staging.allgather(storage, tile.start, math.prod(tile.shape), tile.label)

    def anticipate(self, stage: Stage, storage: TensorStorage, tile: Tile, offset: int | None) -> None:
        """Fetch a tile that `stage`, expected to come next, will need at its head."""
        if self._expected is None or self._expected() is not stage:
            self.drop_anticipated()
            self._expected = weakref.ref(stage)
        if not storage.in_place:
            stage.anticipated.append(self.fetch(storage, tile, offset))

    def drop_anticipated(self) -> None:
        """Let go of what was fetched in advance; what a running graph holds by now stays."""
        expected, self._expected = self._expected and self._expected(), None
        if expected is not None:
            _release_all(expected.anticipated)

    @sealed
    def reset(self) -> None:
        """Forget what was expected, waiting for reads under way, so that every buffer is back."""
        self.drop_anticipated()
        self.staging.drop_staying()
        self._previous = None
        give_back_remains()

    def _after_fork(self) -> None:
        """A child forgets the tiles, which are its parent's. Nobody in it would release the locks."""
        self.staging.forget()
        self._previous = self._expected = self._plan = None


EXECUTOR = Executor()
os.register_at_fork(after_in_child=EXECUTOR._after_fork)


@sealed
def _release_all(tiles: list[StagedTile | ShardedTile]) -> None:
    while tiles:
        EXECUTOR.staging.release(tiles.pop())


class Run:
    """One execution of one graph: the tiles it holds. Its methods are the operations of `ops`.

    With the CPU as the device, host memory is device memory:
    upload moves nothing either, and `wait` returns the buffer that the disk wrote into.
    """

    def __init__(self, program: Program, storages: list[TensorStorage | None]) -> None:
        """`storages`: of each tile; None: of an activation that this run is to offload."""
        self._program = program
        self._tiles = program.schedule.tiles
        self._storages = storages
        self._tiers = list({id(storage.tiers): storage.tiers for storage in storages if storage is not None}.values())
        # Slots die with the model; of a graph without parameters, with its compiled code.
        self._owner: object = next((storage for storage in storages if storage is not None), program.slots)
        if program.slots:
            self._tiers = self._tiers or [Tiers.of(program.plan.config)]
            program.slots.reserve(self._owner, self._tiers[0])
        self._held: dict[int, StagedTile | ShardedTile] = {}
        self._reducing: Reduction | None = None  # the gradient that began last
        self._in_head = True
        self._computing: Note | None = None  # the operator, while somebody records
        self._begun: dict[int, _PartialGradient] = {}  # by the storage's key
        self._unreduced: dict[int, _PartialGradient] = {}  # the same
        # In backward, by the storage's key: what is to come of releases and offloads, and of offloads alone.
        self._uses_left: Counter[int] = Counter()
        self._gradients_left: Counter[int] = Counter()
        self._leaves: dict[int, Leaf] = {}  # the same: the parameters that gradients go to
        if program.schedule.kind == "backward":
            self._leaves = leaves_of_node()
            for tile, uses in program.last_uses.items():
                self._uses_left[storages[tile].key] += uses
                self._gradients_left[storages[tile].key] += program.gradients[tile]

    def await_activations(self) -> None:
        """Before backward, until those that left are on NVMe: what left last is needed first, and the plan has no room
        for their buffers from then on. Raises: StoreError when a write failed."""
        if self._program.awaits_activations:
            for tiers in self._tiers:
                tiers.limit_writes(0)

    def fetch(self, tile: int, offset: int | None = None) -> None:
        """Start reading a tile."""
        self._held[tile] = EXECUTOR.fetch(self._storages[tile], self._tiles[tile], offset)

    def upload(self, tile: int, offset: int | None = None) -> None:
        """Start copying a tile to the device, behind what is queued there by now."""
        EXECUTOR.upload(self._storages[tile], self._tiles[tile], offset)

    def allgather(self, tile: int) -> None:
        """Start to gather the tile's shards, once this rank's is there. One rank holds the whole tile."""
        EXECUTOR.allgather(self._storages[tile], self._tiles[tile])

    def fetch_for_backward(self, tile: int, offset: int | None = None) -> None:
        """Start reading a tile that backward begins with, once it is known that backward follows."""
        if (successor := self._program.successor) is not None:
            EXECUTOR.anticipate(successor, self._storages[tile], self._tiles[tile], offset)

    upload_for_backward = upload

    def allgather_for_backward(self, tile: int) -> None:
        """Start to gather what `fetch_for_backward` reads."""
        if self._program.successor is not None:
            self.allgather(tile)

    def wait(self, tile: int) -> torch.Tensor:
        """The full tile. Between operators, work in the background goes on."""
        for tiers in self._tiers:
            if (background := tiers.background) is not None:
                background.advance()
        if self._in_head:
            self._in_head = False
            EXECUTOR.drop_anticipated()  # this run holds what it needs of it by now
        with RECORDER.about(self._tiles[tile].label):
            return self._held[tile].wait().view(self._tiles[tile].shape)

    def release(self, tile: int) -> None:
        """The tile's buffers are free, unless another run or the turn holds them."""
        EXECUTOR.staging.release(self._held.pop(tile))
        self._passed(tile)

    def keep(self, tile: int) -> None:
        """The graph is done with the tile, which stays in memory until its next fetch."""
        EXECUTOR.staging.stay(self._held.pop(tile), self._storages[tile])
        self._passed(tile)

    def reduce_scatter(self, tile: int, gradient: torch.Tensor) -> torch.Tensor | Reduction:
        """Start to average a gradient over the ranks. One rank's is the average."""
        storage = self._storages[tile]
        if storage.ranks.size == 1:
            return gradient
        parameter = self._accumulating(storage)
        if parameter is None:
            return gradient
        if self._reducing is not None:
            self._reducing.advance()  # by now, its group has summed it while operators computed
        planned = self._tiles[tile]
        with RECORDER.about(planned.label, GRADIENT):
            if planned.rows is None:
                found = reduced(parameter, gradient, planned.label)
            else:
                found = self._reduced_part(storage.key, parameter, planned, gradient)
        self._reducing = found if isinstance(found, Reduction) else None
        return found

    def offload(self, tile: int, shard: torch.Tensor | Reduction, offset: int | None = None) -> None:
        """Move a gradient to its tier and add it to the parameter's `.grad`, as autograd would."""
        with RECORDER.about(self._tiles[tile].label, GRADIENT):
            self._accumulate(self._storages[tile], tile, shard, offset)
        self._gradients_left[self._storages[tile].key] -= 1
        self._passed(tile)

    def _accumulating(self, storage: TensorStorage) -> StoredTensor | None:
        """The parameter with these bytes to whose `.grad` this backward pass is to add, if there is one."""
        leaf = self._leaves.get(storage.key)
        return leaf.parameter if leaf is not None and leaf.accumulates else None

    def _accumulate(
        self, storage: TensorStorage, tile: int, shard: torch.Tensor | Reduction, offset: int | None
    ) -> None:
        parameter = self._accumulating(storage)
        if parameter is None:
            return
        if parameter.has_gradient_hooks:
            raise StoredTensorError(
                f"a hook was registered on '{self._tiles[tile].name}' after its graph was compiled, and would not run: "
                "register hooks before the first compiled call, or call torch.compiler.reset() after it"
            )
        if storage.ranks.size == 1 and self._consumed_from_memory(storage, parameter, shard):
            storage.consumer.make_room(shard.nbytes)
            parameter.grad = shard
            return
        if self._tiles[tile].gradient_tier == "nvme":
            nbytes = round_up(self._tiles[tile].gradient_nbytes_at_once(self._program.plan.stage), PAGE)
            storage.tiers.limit_writes(max(self._program.plan.gradient_buffer - nbytes, 0))
        if self._tiles[tile].rows is None:
            accumulate_gradient(parameter, shard, offset)
        else:
            self._offload_part(storage.key, parameter, self._tiles[tile], shard, offset)

    def offload_activation(
        self, tile: int, value: torch.Tensor, stride: Sequence[int], offset: int | None = None
    ) -> torch.Tensor:
        """Move a saved activation to its tier, through `offset`; its token, which backward gets in its place.

        `stride`: as planned. A kernel may lay its result out in another way than its fake said.
        """
        if value.stride() != tuple(stride):
            value = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
        value = value.as_strided((value.numel(),), (1,))
        tiers, planned = self._tiers[0], self._tiles[tile]
        storage, token = self._program.slots.take(self._owner, tile, tiers)
        if planned.tier == "nvme":
            tiers.limit_writes(max(self._program.plan.activation_buffer - round_up(planned.held_nbytes, PAGE), 0))
        with RECORDER.about(planned.label):
            storage.set(value, offset)
        return token

    def _consumed_from_memory(self, storage: TensorStorage, parameter: StoredTensor, shard: torch.Tensor) -> bool:
        """Whether a gradient needs no place on its tier: whole, it is consumed when this graph has used the tile."""
        whole = shard.shape == parameter.shape and shard.dtype == parameter.dtype
        only = self._gradients_left[storage.key] == 1 and storage.backwards_due == 1 and parameter.grad is None
        return storage.consumer is not None and storage.device.in_host_memory and whole and only

    def _passed(self, tile: int) -> None:
        """A release or an offload of a tile is over. After the last of a backward graph, and when
        no other graph is to use it, the gradient may be consumed."""
        if tile not in self._program.last_uses or not self._uses_left:
            return
        storage = self._storages[tile]
        self._uses_left[storage.key] -= 1
        if not self._uses_left[storage.key]:
            storage.backwards_due = max(storage.backwards_due - 1, 0)
            leaf = self._leaves.get(storage.key)
            if storage.consumer is not None and not storage.backwards_due and leaf is not None:
                storage.consumer.arrived(leaf.parameter)

    def _reduced_part(
        self, key: int, parameter: StoredTensor, tile: Tile, gradient: torch.Tensor
    ) -> torch.Tensor | Reduction:
        """The gradient of one of a parameter's tiles on its way over the ranks, the first time with what this rank
        accumulated by itself."""
        if (taken := take_unreduced(parameter)) is not None:
            self._unreduced[key] = _PartialGradient(parameter, self._starts(key), taken)
        waits = self._unreduced.get(key)
        before = waits.before if waits is not None and tile.start in waits.missing else None
        found = reduced_part(parameter, tile.start, gradient, tile.label, before)
        if before is not None:
            waits.missing.remove(tile.start)
        return found

    def _starts(self, key: int) -> set[int]:
        """The first elements of a parameter's tiles."""
        return {t.start for s, t in zip(self._storages, self._tiles, strict=True) if s is not None and s.key == key}

    def _offload_part(
        self, key: int, parameter: StoredTensor, tile: Tile, shard: torch.Tensor | Reduction, offset: int | None
    ) -> None:
        """Add to a range of the gradient, or write it where this run is the first to; it began with no values."""
        if parameter.grad is None:
            begin_gradient(parameter, isinstance(shard, Reduction))
            self._begun[key] = _PartialGradient(parameter, self._starts(key))
        begun = self._begun.get(key)
        first = begun is not None and tile.start in begun.missing
        accumulate_gradient_part(parameter, tile.start, shard, first=first, offset=offset)
        if first:
            begun.missing.remove(tile.start)

    def begin_operator(self, index: int) -> None:
        """What computes from now on is of this operator."""
        let_through()
        if RECORDER.log is not None:
            self._note_memory()
            label = self._program.schedule.operators[index].label
            self._computing = RECORDER.begin(self._program.schedule.kind, 0, self._device, label, str(index))

    def end_operator(self) -> None:
        """The operator that began last has computed all."""
        if RECORDER.log is not None:
            RECORDER.end(self._computing)
            self._note_memory()
        self._computing = None

    @property
    def _device(self) -> torch.device:
        return next((s.device.torch_device for s in self._storages if s is not None), CPU.torch_device)

    def _note_memory(self) -> None:
        RECORDER.holds("host", sum(tiers.host.in_use for tiers in self._tiers))
        if self._device.type == "cuda":
            RECORDER.holds("device", torch.cuda.memory_allocated(self._device))

    @sealed
    def abort(self, error: BaseException) -> None:
        """After `error`: drain the reads under way and give every buffer back. Half a gradient is none."""
        self.end_operator()
        RECORDER.step_ends()
        for begun in self._begun.values():
            if begun.missing:
                begun.parameter.grad = None
        for begun in self._unreduced.values():
            if begun.parameter.grad is None:
                begun.parameter.grad = begun.before
        if self._uses_left:
            for consumer in {storage.consumer for storage in self._storages if storage.consumer is not None}:
                consumer.interrupted(error)
        while self._held:
            EXECUTOR.staging.release(self._held.popitem()[1])
        EXECUTOR.reset()


@dataclass
class _PartialGradient:
    """A new gradient that arrives tile by tile, and the first elements of the tiles that have not arrived.

    `before`: of this rank alone, what is to be added to each tile's once.
    """

    parameter: StoredTensor
    missing: set[int]
    before: StoredTensor | None = None
