"""What training a model takes on given hardware, before either exists: memory, bandwidth, time, disk and wear.

A model is planned without values for each placement, as `explain` plans it, and a step of each plan is simulated. A
Transformer of many layers is planned at two depths, and extended: from one depth to the other, each layer adds the same
to every figure (tests/test_estimates.py compares that with a plan of all layers).
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from zinf_fx.adam import SPLIT, AdamStates, MasterForm, StateForm, has_master, state_dtype
from zinf_fx.arguments import did_you_mean
from zinf_fx.config import PRESETS, Config, FrozenDtype, Preset
from zinf_fx.cycles import no_search_for_cycles
from zinf_fx.errors import BudgetError, ConfigError
from zinf_fx.frontend.explain import captured_graphs
from zinf_fx.placement import Placement, Tier
from zinf_fx.plan.checkpoint_bytes import Checkpoints, CheckpointSizes, checkpoint_sizes, checkpoints
from zinf_fx.plan.hardware import SECONDS_PER_DAY, Hardware
from zinf_fx.plan.memory.accounting import Traffic, phases
from zinf_fx.plan.memory.use import chunk_buffers, host_states, staying_on_device
from zinf_fx.plan.placement.decision import as_placed, needed_with_values
from zinf_fx.plan.placement.placing import Rooms, capacities
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.sharding import Groups
from zinf_fx.plan.simulation.event_graph import Job
from zinf_fx.plan.simulation.simulate import simulate_plan
from zinf_fx.plan.update import trained_in

if TYPE_CHECKING:
    from zinf_fx.frontend.decisions import Divisions

T = TypeVar("T")

# Each costs less to communicate than those after it, so the first that fits is the one to take (ZeRO-Infinity, section
# 7.1: offload only what device memory can't hold).
PLACEMENTS: tuple[Preset, ...] = (
    "dp",
    "zero-1",
    "zero-2",
    "zero-3",
    "zero-offload",
    "infinity-cpu",
    "infinity-nvme",
    "nvme",
)

# What a step moves besides computing: of which state, and through what.
_STATES, _OPTIMIZER, _ACTIVATIONS = "parameters, gradients", "optimizer states", "activations"
_THROUGH = {"link": "links", "upload": "host", "download": "host", "disk": "NVMe"}
_MOVES = tuple(
    f"{state}: {where}"
    for state in (_STATES, _OPTIMIZER, _ACTIVATIONS)
    for where in ("links", "device", "host", "NVMe")
)

# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A model, and how it is planned.

    Attributes:
        name: what people call it.
        dtype: of most parameters, such as "bfloat16".
        layers: how many it has.
        built: by depth, a model of so many layers, with example inputs of one rank. It is one of `layers`, or two of
            fewer.
        activations: as the option of this name.
        frozen: the format of frozen matrices; None: as they are.
    """

    name: str
    dtype: str
    layers: int
    built: Mapping[int, tuple[nn.Module, Sequence[Any] | Mapping[str, Any]]]
    activations: int | None = None
    frozen: FrozenDtype | None = None

    @property
    def recomputes(self) -> bool:
        """Whether backward computes activations again, which a module says itself."""
        return self.activations is not None


def of_module(
    model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any], *, name: str, frozen: FrozenDtype | None = None
) -> Workload:
    """Describe a module with example inputs of one rank. `frozen`: the format of its frozen matrices, except tables."""
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    elements: Counter[str] = Counter()
    for parameter in model.parameters():
        elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    dtype = max(elements, key=elements.__getitem__, default="float32")
    return Workload(name, dtype, 1, {1: (model, inputs)}, frozen=frozen)


def of_transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    batch: int,
    sequence: int,
    interval: int = 1,
    dtype: str = "bfloat16",
    lora: int | None = None,
    frozen: FrozenDtype | None = None,
) -> Workload:
    """Describe a GPT-like Transformer with activation checkpoints (ZeRO-Infinity, sections 3 and 4.1).

    `batch`: sequences per rank. `interval`: layers from one checkpoint to the next. `lora`: the rank of adapters in
    fp32 beside each linear layer, which alone are trained then; `frozen`: the format of the others, default `dtype`.

    Raises: ConfigError for a format of what is frozen where nothing is.
    """
    if frozen is not None and lora is None:
        raise ConfigError(f"frozen={frozen!r} is a format of frozen parameters, and all are trained: give --lora RANK")
    name = f"Transformer of {layers:,} layers x {hidden:,} hidden, {heads:,} heads; batch {batch:,} x {sequence:,}"
    if lora is not None:
        name += f"; LoRA of rank {lora:,}, all else frozen in {frozen or dtype}"
    # What the ends of a step have beside its middle is in the first depth: transfers start some operators ahead, of
    # which a layer has four. And a layer takes as much as another one on average only.
    fewer = interval * (2 + -(-3 // interval))
    more = fewer + interval * -(-2 // interval)
    depths = (fewer, more) if layers > more else (layers,)
    # As a view, the input takes no memory for planning.
    with torch.device("meta"):
        inputs = (torch.empty(batch, sequence, 1, dtype=getattr(torch, dtype)),)
        built = {depth: (Transformer(depth, hidden, heads, getattr(torch, dtype), lora), inputs) for depth in depths}
    return Workload(name, dtype, layers, built, interval, frozen)


class Transformer(nn.Module):
    """Layers of 12 x hidden² parameters: embeddings, norms and biases are left out (ZeRO-Infinity, section 3)."""

    def __init__(self, layers: int, hidden: int, heads: int, dtype: torch.dtype, rank: int | None) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = nn.ModuleList(_Layer(hidden, heads, dtype, rank) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a number of sequences of shape (batch, sequence, 1)."""
        x = x.expand(-1, -1, self.hidden)
        for layer in self.layers:
            x = layer(x)
        return x.mean(dtype=torch.float32)


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, dtype: torch.dtype, rank: int | None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = _Linear(hidden, 3 * hidden, dtype, rank)
        self.out = _Linear(hidden, hidden, dtype, rank)
        self.up = _Linear(hidden, 4 * hidden, dtype, rank)
        self.down = _Linear(4 * hidden, hidden, dtype, rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(normed).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))


class _Linear(nn.Linear):
    """A layer without a bias or, with adapters of a rank, a frozen one beside these."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, rank: int | None) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=dtype)
        self.rank = rank
        if rank is not None:
            self.weight.requires_grad_(False)
            self.a = nn.Parameter(torch.empty(rank, inputs, dtype=torch.float32))
            self.b = nn.Parameter(torch.empty(outputs, rank, dtype=torch.float32))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        if self.rank is None:
            return output
        # Adapters compute in the dtype of what comes in, as under autocast.
        return output + F.linear(F.linear(input, self.a.to(input.dtype)), self.b.to(input.dtype))


# -- the optimizer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps of a parameter: Adam's states, or `nbytes` per element in their place.

    Attributes:
        state_dtype, master_dtype: of the moments, and of the masters of bf16 parameters; None: fp32.
    """

    nbytes: int | None = None
    state_dtype: StateForm | None = None
    master_dtype: MasterForm | None = None

    def check_model(self, model: nn.Module) -> None:
        """Raises: ConfigError for a trained parameter whose master can't be kept so."""
        for parameter in model.parameters():
            splits = self.master_dtype == SPLIT and parameter.requires_grad and has_master(parameter.dtype.itemsize)
            if splits and parameter.dtype != torch.bfloat16:
                raise ConfigError(
                    f"master-dtype={SPLIT!r} is for bfloat16 parameters, and these are {parameter.dtype}: leave it out"
                )


ADAM = Optimizer()
"""In mixed precision."""


@dataclass(frozen=True)
class _OtherStates(AdamStates):
    """States of so many bytes per element."""

    element: int = 0

    @property
    def bytes_each(self) -> tuple[int, ...]:
        return (self.element,)

    def nbytes_by_dtype(self, elements: int, dtype: str) -> Counter[str]:
        return Counter({state_dtype(dtype, self.itemsize): elements * self.element})


@dataclass(frozen=True)
class _TileOfOther(Tile):
    """A tile of whose elements an optimizer keeps so many bytes."""

    state_bytes: int = 0

    @property
    def states(self) -> AdamStates:
        return _OtherStates(self.dtype.itemsize, element=self.state_bytes)


def with_state_bytes(plan: Plan, nbytes: int) -> Plan:
    """The plan as it would be for an optimizer that keeps so many bytes per element; its buffers stay as they are."""

    def other(tile: Tile) -> Tile:
        return _TileOfOther(**{field.name: getattr(tile, field.name) for field in fields(tile)}, state_bytes=nbytes)

    return replace(plan, graphs=tuple(replace(g, tiles=tuple(map(other, g.tiles))) for g in plan.graphs))


# -- what a plan says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """Bytes, and the seconds that they take with nothing beside them."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Figures:
    """What one rank has and does in a step, by its plan.

    Attributes:
        needed: bytes of each memory, with what is in flight at most and, on the device, the values computed with.
        living, living_on_host: of these, bytes on the device and in host memory that no event moves.
        chunks: bytes of host memory for the optimizer's chunks, and `chunks_at_most`, in a model of all layers.
        values: bytes of values that an operator computes with at most.
        activations: bytes that are saved for backward, wherever they live.
        gradients: bytes of all gradients, in one copy.
        saved: bytes of parameters and optimizer states, in one copy.
        tiles: into how many the parameter of most tiles is divided.
        flops: floating point operations.
        overlapped: seconds of a simulated step.
        computing: seconds of computing, with nothing beside it.
        moved: by what of a state is moved through what, as in "optimizer states: NVMe".
        disk: bytes that NVMe reads and writes.
    """

    needed: Mapping[Tier, int]
    living: int
    living_on_host: int
    chunks: int
    chunks_at_most: int
    values: int
    activations: int
    gradients: int
    saved: CheckpointSizes
    tiles: int
    flops: int
    overlapped: float
    computing: float
    moved: Mapping[str, Moved]
    disk: Traffic

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part of a step that takes any, with nothing beside it."""
        return {"compute": self.computing} | {
            name: moved.seconds for name, moved in self.moved.items() if moved.seconds
        }

    @property
    def serial(self) -> float:
        """Seconds of a step, with nothing overlapped."""
        return sum(self.seconds.values())


def figures_of(plan: Plan, hardware: Hardware, layers: Fraction = Fraction(1)) -> Figures:
    """What a plan says of a step on hardware with as many ranks. `layers`: how many times those of the plan the whole
    model has. Raises: ConfigError for a dtype without a peak."""
    there = capacities(hardware, plan.world_size)
    values, needed = needed_with_values(plan, there)
    plan = as_placed(plan, there)
    simulation = simulate_plan(plan, hardware)
    activations = {tile.label: tile.held_nbytes for tile in plan.tiles if tile.activation}
    moved = dict.fromkeys(_MOVES, Moved())
    computing = 0.0
    for job in simulation.jobs:
        if (name := _moves(job, activations)) is None:
            computing += job.seconds
        else:
            # Of an update, as many bytes are written as are read.
            nbytes = job.nbytes * (2 if job.kind == "update" else 1)
            moved[name] = Moved(moved[name].nbytes + nbytes, moved[name].seconds + job.seconds)
    parameters = [tile for tile in plan.tiles if not tile.activation]
    trained = [tile for tile in parameters if tile.gradient_tier is not None]
    return Figures(
        needed=needed,
        living=staying_on_device(plan),
        living_on_host=host_states(plan).total,
        chunks=plan.regions.chunks,
        chunks_at_most=chunk_buffers(
            plan.config,
            trained_in(plan) * math.ceil(layers),
            elements=plan.regions.chunk_elements,
            count=plan.regions.chunk_count,
            own_memory=plan.has_own_memory,
        ).total,
        values=values,
        activations=plan.kept + sum(activations.values()),
        gradients=sum(member.numel * t.dtype.itemsize for t in trained for member in t.members or (t,)),
        saved=checkpoint_sizes(plan),
        tiles=max(Counter(tile.name for tile in parameters).values(), default=1),
        flops=simulation.flops,
        overlapped=simulation.seconds,
        computing=computing,
        moved=moved,
        disk=sum((traffic for _, traffic in phases(plan)), Traffic()),
    )


def _moves(job: Job, activations: Mapping[str, int]) -> str | None:
    """What a job moves through what; None: it computes, or copies within the memory that is computed in."""
    if job.kind in ("read_states", "write_states"):
        return f"{_OPTIMIZER}: NVMe"
    if job.kind == "update":
        return f"{_OPTIMIZER}: {'host' if job.resource == 'host' else 'device'}"
    if job.resource not in _THROUGH:
        return None
    return f"{_ACTIVATIONS if job.subject in activations else _STATES}: {_THROUGH[job.resource]}"


def combined(first: T, second: T, combine: Callable[[Any, Any], Any]) -> T:
    """What `combine` makes of each number of two figures; a number that one of them lacks is 0."""
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        parts = {name: combined(getattr(first, name), getattr(second, name), combine) for name in names}
        return type(first)(**parts)  # type: ignore[return-value]
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = dict.fromkeys((*first, *second))
        return {key: combined(first.get(key, 0), second.get(key, 0), combine) for key in keys}  # type: ignore[return-value]
    number = combine(first, second)
    return round(number) if isinstance(first, int) and isinstance(second, int) else float(number)  # type: ignore[return-value]


class Planner:
    """The plans of a workload, and what they say."""

    def __init__(self, workload: Workload, hardware: Hardware, optimizer: Optimizer) -> None:
        self.there: Rooms = capacities(hardware, hardware.ranks)
        self._workload, self._hardware, self._optimizer = workload, hardware, optimizer
        self._captured, self.planned = cache(self._capture), cache(self._plan)

    def figures(self, placement: Placement, room: int | None = None) -> Figures:
        """What the plan says. `room`: bytes of the device for all that is in flight; None: as much as it takes. Raises:
        BudgetError where that isn't enough."""
        by_depth = {depth: self.planned(depth, placement, room) for depth in self._workload.built}
        step = self._extended(by_depth)
        # A few layers may have fewer elements than there are chunks for.
        tier: Tier = "host" if self.there.host else "device"
        too_many = max(step.chunks - max(figures.chunks_at_most for figures in by_depth.values()), 0)
        return replace(step, needed={**step.needed, tier: step.needed[tier] - too_many})

    def _extended(self, by_depth: Mapping[int, T]) -> T:
        """Figures for all layers, of those by depth."""
        if len(by_depth) == 1:
            (only,) = by_depth.values()
            return only
        (shallow, fewer), (deep, more) = sorted(by_depth.items(), key=lambda item: item[0])
        steps = Fraction(self._workload.layers - shallow, deep - shallow)
        return combined(fewer, more, lambda low, high: low + steps * (high - low))

    def _plan(self, depth: int, placement: Placement, room: int | None) -> Figures:
        options: dict[str, object] = {"device_memory": None}
        if room is not None:
            # What is kept in that room for its next use is a share of a few layers that deep models don't have.
            options = {"device_memory": room + self.planned(depth, placement, None).living, "residency": False}
        ranks = self._hardware.ranks
        graphs = self._captured(depth, Groups.of(ranks, 1, placement.stage))
        planned = [graph.planned(placement, self._hardware, **options) for graph in graphs]
        plans = [graph.plan for graph in planned if graph.plan is not None and graph.moves]
        if self._optimizer.nbytes is not None:
            plans = [with_state_bytes(plan, self._optimizer.nbytes) for plan in plans]
        layers = Fraction(self._workload.layers, depth)
        figures = [figures_of(plan, self._hardware, layers) for plan in plans]
        if not any(of_graph.gradients for of_graph in figures):
            name = self._workload.name
            raise ConfigError(f"{name} trains nothing: no parameter requires a gradient from what the model returns")
        # Where Dynamo captures a model in several graphs, each has states and buffers of its own.
        return reduce(lambda total, of_graph: combined(total, of_graph, operator.add), figures)

    def _capture(self, depth: int, groups: Groups) -> list[Divisions]:
        workload, optimizer = self._workload, self._optimizer
        model, inputs = workload.built[depth]
        config = Config(
            placement="nvme" if groups.shards == groups.ranks else "dp",
            frozen_dtype=workload.frozen,
            device_memory=self.there.device,  # so that parameters are divided over ranks as tiles for it need them
            activations="keep" if workload.activations is None else workload.activations,
        )
        rates = Rates.of(self._hardware, workload.dtype, "host")
        return captured_graphs(model, inputs, config, groups, rates, optimizer.state_dtype, optimizer.master_dtype)

    def parameters(self) -> int:
        """How many elements all parameters have."""
        built = self._workload.built.items()
        return self._extended({depth: sum(p.numel() for p in model.parameters()) for depth, (model, _) in built})


# -- the estimate -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """One placement.

    Attributes:
        activations: where what is saved for backward lives: on the device, or in host memory if only so it fits.
        memory: bytes of one device, of one node's host memory, and of one node's NVMe.
        exceeded: the memories that are too small.
        step: what one rank does.
        disk_read, disk_written: bytes per step, of all nodes.
        written_per_day: bytes per day on one node, at the rate of simulated steps.
        days: until a node's drives have written what they endure; None where that isn't known or nothing is written.
    """

    preset: Preset
    activations: Tier
    memory: Mapping[Tier, int]
    exceeded: tuple[Tier, ...]
    step: Figures
    disk_read: int
    disk_written: int
    written_per_day: float
    days: float | None

    @property
    def fits(self) -> bool:
        """Whether every memory is large enough."""
        return not self.exceeded


@dataclass(frozen=True)
class Need:
    """Bytes per second of one rank that wanted efficiencies take, if nothing else is moved (section 4).

    Attributes:
        moved: what is moved, and through what.
        intensity: FLOP per byte (of a rank's work and what the rank moves).
        bandwidths: by efficiency.
        available: what the hardware has.
    """

    moved: str
    intensity: float
    bandwidths: Mapping[float, float]
    available: float


@dataclass(frozen=True)
class Estimate:
    """The answer.

    Attributes:
        parameters: how many elements they have.
        states: bytes of each model state, in one copy.
        predictions: by placement, those first that cost less to communicate.
        chosen: the placement that all else is about: that asked for, else the first to fit; None if none does.
        needs: bandwidths for it.
        saves: what checkpoints on disk cost with it.
    """

    workload: Workload
    hardware: Hardware
    parameters: int
    states: Mapping[str, int]
    predictions: tuple[Prediction, ...]
    chosen: Prediction | None
    needs: tuple[Need, ...]
    saves: Checkpoints | None


def estimate(
    workload: Workload,
    hardware: Hardware,
    *,
    optimizer: Optimizer = ADAM,
    wanted: Sequence[float] = (),
    preset: str | None = None,
    every: float = 1800.0,
    kept: int = 3,
) -> Estimate:
    """What the workload takes on the hardware.

    Args:
        wanted: efficiencies between 0 and 1 to give bandwidths for.
        preset: to give them for this one, not for the first that fits.
        every: seconds from one checkpoint on disk to the next; `kept`: how many there are.

    Raises: ConfigError; PlanError where the model can't be planned; and what the model itself raises.
    """
    for efficiency in wanted:
        if not 0 < efficiency < 1:
            raise ConfigError(f"efficiency={efficiency:g} is not accepted: give numbers above 0 and below 1")
    if preset is not None and preset not in PLACEMENTS:
        meant = did_you_mean(preset, PLACEMENTS)
        raise ConfigError(f"placement={preset!r} is unknown; accepted: {', '.join(map(repr, PLACEMENTS))}{meant}")
    peak = hardware.achieved(workload.dtype)
    for model, _ in workload.built.values():
        optimizer.check_model(model)
    planner = Planner(workload, hardware, optimizer)
    with no_search_for_cycles():
        predictions = tuple(_predicted(name, planner, hardware) for name in PLACEMENTS)
    fitting = (prediction for prediction in predictions if prediction.fits)
    chosen = predictions[PLACEMENTS.index(preset)] if preset in PLACEMENTS else next(fitting, None)
    any_step = predictions[0].step
    states = {
        "parameters": sum(any_step.saved.parameters.values()),
        "gradients": any_step.gradients,
        "optimizer": sum(any_step.saved.states.values()),
    }
    needs = tuple(_needs(chosen.step, peak, wanted)) if chosen else ()
    saves = checkpoints(chosen.step.saved, hardware, every=every, kept=kept) if chosen else None
    return Estimate(workload, hardware, planner.parameters(), states, predictions, chosen, needs, saves)


def _predicted(preset: Preset, planner: Planner, hardware: Hardware) -> Prediction:
    there = planner.there
    placement, step = _fitted(PRESETS[preset], planner)
    written = hardware.ranks * step.disk.host_to_nvme
    per_day = written / hardware.nodes / step.overlapped * SECONDS_PER_DAY
    per_node: dict[Tier, int] = {"device": 1, "host": hardware.ranks_per_node, "nvme": hardware.ranks_per_node}
    return Prediction(
        preset=preset,
        activations=placement.activations,
        memory={tier: per_node[tier] * nbytes for tier, nbytes in step.needed.items()},
        exceeded=tuple(tier for tier, nbytes in step.needed.items() if nbytes > getattr(there, tier)),
        step=step,
        disk_read=hardware.ranks * step.disk.nvme_to_host,
        disk_written=written,
        written_per_day=per_day,
        days=hardware.nvme.days_until_worn(per_day),
    )


def _fitted(placement: Placement, planner: Planner) -> tuple[Placement, Figures]:
    """The first way to make room on the device with which it has enough, else the last: those first that move less.

    Where parameters leave the device, so may activations (ZeRO-Infinity, section 5.1.2). Where they are partitioned,
    fewer transfers may be under way, and parameters divided into tiles (5.1.3).
    """
    there = planner.there
    step = planner.figures(placement)
    if step.needed["device"] > there.device and placement.parameters != "device" and there.host:
        placement = replace(placement, activations="host")
        step = planner.figures(placement)
    if step.needed["device"] <= there.device or any(
        step.needed[tier] > getattr(there, tier) for tier in ("host", "nvme")
    ):
        return placement, step
    left = there.device - step.living - (0 if there.host else step.living_on_host)
    values = step.values
    for _ in range(2 if placement.stage == 3 else 0):  # with tiles, operators compute with other values
        if values >= left:
            break
        try:
            limited = planner.figures(placement, left - values)
        except BudgetError:
            break
        if limited.needed["device"] <= there.device:
            return placement, limited
        values = limited.values
    return placement, step


def _needs(step: Figures, peak: float, wanted: Sequence[float]) -> Iterator[Need]:
    """Bandwidths by equation 2 of ZeRO-Infinity, solved for these."""
    for name, moved in step.moved.items():
        if moved.seconds:
            intensity = step.flops / moved.nbytes
            bandwidths = {efficiency: peak * efficiency / (intensity * (1 - efficiency)) for efficiency in wanted}
            yield Need(name, intensity, bandwidths, moved.nbytes / moved.seconds)
