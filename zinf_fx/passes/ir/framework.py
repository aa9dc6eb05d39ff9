"""What a pass is, and what passes know besides the graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import fx
from torch.fx.node import Argument

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.plan.memory.use import HostUse, gradient_buffer, living_on, write_buffer
from zinf_fx.plan.plan import Choice
from zinf_fx.plan.rates import NOMINAL, Rates
from zinf_fx.plan.schedule import PROLOGUE, Event, EventKind, GraphKind, MemoryRegions, PackMember, Tile, UpdateSchedule

# Node metadata that passes write and later stages read.
OPERATOR = "zinf_operator"  # number of the operator that a computing node belongs to; PROLOGUE before the first
GROUP = "zinf_group"  # number of the group of operators that are one, as all micro-batches run them one after the other
MADE_BY = "zinf_made_by"  # name of the pass that made the node


class TileKey(NamedTuple):
    """Which tile a `zinf` node is about: the placeholder of its parameter's token, and its first element in that. Where
    there are events, these say so by the tile's number in the table."""

    token: str
    start: int = 0


def key_of(node: fx.Node) -> TileKey:
    """The key of the tile that a `zinf` node is about: the node itself is the token of an activation that leaves."""
    if node.target is ops.offload_activation:
        return TileKey(node.name)
    start = node.kwargs.get("start", 0)
    assert isinstance(start, int)
    return TileKey(operand(node).name, start)


def start_argument(key: TileKey) -> dict[str, Argument]:
    """The keyword argument that tells a parameter's tiles apart; the first one's is the default."""
    return {"start": key.start} if key.start else {}


class PrologueTransfer(NamedTuple):
    """A transfer of a tile that a graph needs before it begins: `operators_early` operators before its first."""

    op: torch._ops.OpOverload
    tile: int
    operators_early: int


@dataclass(frozen=True)
class GraphContext:
    """What the passes know of one graph besides its nodes. A pass that learns more returns a context that says so.

    Attributes:
        kind: which graph it is.
        config: the options in force.
        tiles: each parameter as one tile, by the name of the placeholder that carries its token; and each pack, and
            each activation that leaves, by the name of the node that is its token.
        made: the tokens of parameters in the order in which these were made: so small ones lie side by side.
        treatments: by token, what parameters that move together have alike besides what their tiles say: their options
            over ranks, and the number of their group of ranks.
        gradients: joint and backward: by position among the outputs of backward, the token of the parameter whose
            gradient it is.
        backward_outputs: joint only: how many of its last outputs are those of backward.
        successor_prologue: what the next graph needs in its prologue; this graph starts it in its last operators.
        provided: what the passes so far have established.
        divided: by token, the tiles of each parameter that has several, in the order of their rows.
        undivided: by token, why a parameter that exceeds the tile limit is one tile nevertheless.
        staying: tiles that are in memory throughout: from a use before the graph to one after it.
        kept: bytes of activations that stay on the device from forward to backward; joint: what several ranks have
            agreed to leave for these, 0 where they have not.
        unmoved: bytes of buffers, and of parameters that are not stored, which are on the device throughout.
        written: by token, how often forward, or inference, writes to the parameter.
        tensor_ranks: how many ranks divide parameters, and activations; 1: activations are whole.
        rates: of the machine that the plan is for.
        regions: what the plan's transfer buffers take of each memory.
        update: the optimizer's step that follows the plan's graphs.
        tile_limit: bytes above which parameters were divided.
        choices: what the joint graph saves and recomputes.
    """

    kind: GraphKind | Literal["joint"]
    config: Config
    tiles: Mapping[str, Tile]
    made: tuple[str, ...] = ()
    treatments: Mapping[str, Hashable] = field(default_factory=dict)
    gradients: Mapping[int, str] = field(default_factory=dict)
    backward_outputs: int = 0
    successor_prologue: tuple[PrologueTransfer, ...] = ()
    provided: frozenset[str] = frozenset()
    divided: Mapping[str, tuple[Tile, ...]] = field(default_factory=dict)
    undivided: Mapping[str, str] = field(default_factory=dict)
    staying: tuple[int, ...] = ()
    kept: int = 0
    unmoved: int = 0
    written: Mapping[str, int] = field(default_factory=dict)
    tensor_ranks: int = 1
    rates: Rates = NOMINAL
    regions: MemoryRegions = field(default_factory=MemoryRegions)
    update: UpdateSchedule = field(default_factory=UpdateSchedule)
    tile_limit: int | None = None
    choices: tuple[Choice, ...] = ()

    @property
    def budget(self) -> int | None:
        """Bytes that may be in flight at once (see [Note: bytes in flight]); None: no limit; negative: no room."""
        return None if self.limit is None else self.limit - self.gradient_buffer - self.activation_buffer

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget."""
        return self.config.device_memory is not None or self.config.host_memory is not None

    @cached_property
    def limit(self) -> int | None:
        """Bytes for all that is moved: of the memories, what lives in them leaves; None: no limit."""
        return min(self.left.values(), default=None)

    @property
    def left(self) -> dict[str, int]:
        """Bytes of each memory that has a budget, by the option's name, which what lives there leaves."""
        left = {}
        if (device := self.config.device_memory) is not None:
            left["device_memory"] = device - self.unmoved - self.kept - self.living_on_device.total
        if (host := self.config.host_memory) is not None:
            left["host_memory"] = host - self.living.total
        return left

    @property
    def planned_kind(self) -> GraphKind:
        """Which graph a planned one is: no joint one, which plans don't have."""
        assert self.kind != "joint"
        return self.kind

    @property
    def living(self) -> HostUse:
        """The states, and the activations that left, that live in host memory."""
        return living_on("host", self.tiles.values(), self.config.stage)

    @property
    def living_on_device(self) -> HostUse:
        """The states that live on the device."""
        return living_on("device", self.tiles.values(), self.config.stage)

    @property
    def gradient_buffer(self) -> int:
        """Bytes of gradients that may be on their way to NVMe at once."""
        if self.kind != "backward":
            return 0
        trained = [tile for token in self.gradients.values() for tile in self.tiles_of(token).values()]
        return gradient_buffer(trained, self.limit, self.config.stage)

    @property
    def activation_buffer(self) -> int:
        """Bytes of activations, and of new values of parameters, that may be on their way to NVMe at once."""
        if self.kind not in ("forward", "inference"):
            return 0
        leaving = [tile for token, tile in self.tiles.items() if tile.activation or token in self.written]
        return write_buffer([tile.held_nbytes for tile in leaving if tile.tier == "nvme"], self.limit)

    def member_of(self, node: fx.Node) -> PackMember:
        """The parameter that a node takes out of a pack."""
        number = node.kwargs["number"]
        assert isinstance(number, int)
        return self.tile_of(operand(node)).members[number]

    def comes_anew(self, token: str) -> bool:
        """Whether a parameter's tiles are gathered for each operator that uses them.

        What was too large to be there as a whole must not be, and under a budget it is decided what stays in memory,
        but of packs, which are small.
        Else a tile is gathered once, and there from its first use in a graph to its last.
        """
        return token in self.divided or (self.is_limited and not self.tiles[token].members)

    def tile_of(self, node: fx.Node) -> Tile:
        """The tile that a `zinf` node is about."""
        return self.tile(key_of(node))

    def tile(self, key: TileKey) -> Tile:
        """The tile of a key."""
        return self._by_key[key]

    @cached_property
    def keys(self) -> tuple[TileKey, ...]:
        """The keys of all tiles, in the order of `table`."""
        return tuple(self._by_key)

    @cached_property
    def numbers(self) -> dict[TileKey, int]:
        """The index of each tile in `table`, by key."""
        return {key: number for number, key in enumerate(self.keys)}

    @cached_property
    def table(self) -> tuple[Tile, ...]:
        """All tiles, as events refer to them: the schedules of a step share it."""
        tiles = self._by_key.values()
        untrained = {"gradient_tier": None, "state_tier": None, "state_dtype": None, "master_dtype": None}
        return tuple(tiles if self.kind != "inference" else (replace(tile, **untrained) for tile in tiles))

    @cached_property
    def _by_key(self) -> dict[TileKey, Tile]:
        return {key: tile for token in self.tiles for key, tile in self.tiles_of(token).items()}

    def tiles_of(self, token: str) -> dict[TileKey, Tile]:
        """The tiles of one parameter, in the order of their rows."""
        return {TileKey(token, tile.start): tile for tile in self.divided.get(token, (self.tiles[token],))}


class Pass(ABC):
    """One rewrite of a graph. One that has options is a frozen dataclass of them.

    Attributes:
        name: what messages and printed graphs call it.
        requires: what passes before it must have established.
        provides: what it establishes.
        changes_numerics: whether the graph may round in other places afterwards.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    changes_numerics: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        """Rewrite `graph` in place. Returns what is known of it then."""


def nodes_calling(graph: fx.Graph, *targets: object) -> Iterator[fx.Node]:
    """The nodes that call one of `targets`, in graph order."""
    return (node for node in list(graph.nodes) if node.op == "call_function" and node.target in targets)


def gathers_in(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The gathers of each token, by its name, in graph order."""
    gathers: defaultdict[str, list[fx.Node]] = defaultdict(list)
    for gather in nodes_calling(graph, ops.gather):
        gathers[operand(gather).name].append(gather)
    return dict(gathers)


def tokens_in(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the inputs, tokens among them, and the tokens of packs, by name."""
    return {node.name: node for node in graph.nodes if node.op == "placeholder" or node.target is ops.pack}


def event_of(node: fx.Node) -> Event:
    """The event that a `zinf` node of a lowered graph is."""
    return node.meta[ops.EVENT]


def give_event(node: fx.Node, context: GraphContext, operator: int, *, for_backward: bool = False) -> None:
    """Make a `zinf` node an event of the schedule."""
    assert isinstance(node.target, torch._ops.OpOverload)
    kind = cast("EventKind", ops.KINDS[node.target])
    set_event(node, Event(kind, context.numbers[key_of(node)], operator, for_backward=for_backward))


def set_event(node: fx.Node, event: Event) -> None:
    """Make a `zinf` node this event."""
    node.meta[ops.EVENT] = event


def events_in(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a lowered graph that are events, in the schedule's order."""
    return list(nodes_calling(graph, *ops.LOWERED))


def is_compute(node: fx.Node) -> bool:
    """Whether the node computes something: neither a transfer nor an input, constant or output."""
    of_tiles = (ops.pack, ops.gather, *ops.LOWERED)
    return node.op in ("call_function", "call_module", "call_method") and node.target not in of_tiles


def computing(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Return the nodes that compute something, by operator."""
    nodes: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in filter(is_compute, graph.nodes):
        nodes[operator_of(node)].append(node)
    return nodes


def bytes_computed(node: fx.Node) -> int:
    """Bytes of a node's result, with the sizes at hand where they are symbolic; of a tuple 0, as its members count."""
    value = node.meta.get("val")
    return (size_at_hand(value.numel()) or 0) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node, whose types the schema of what it calls says."""
    return node.args


def operand(node: fx.Node, index: int = 0) -> fx.Node:
    """The node that is this positional argument of a node."""
    argument = node.args[index]
    assert isinstance(argument, fx.Node)
    return argument


def results_of(graph: fx.Graph) -> list[Any]:
    """What a graph returns: nodes, and constants such as None."""
    return list(arguments_of(graph.output_node())[0])


def size_at_hand(size: int | torch.SymInt) -> int | None:
    """A size as it is in the call at hand, of which Dynamo makes no guard; None: an operator will say at run time."""
    if isinstance(size, torch.SymInt):
        hint: Any = size.node.hint if size.node.has_hint() else None
        return None if hint is None else int(hint)
    return size


def operator_of(node: fx.Node) -> int:
    """The number of the operator that a node belongs to."""
    event = node.meta.get(ops.EVENT)
    return node.meta.get(OPERATOR, PROLOGUE) if event is None else event.operator
