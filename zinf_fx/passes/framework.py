"""What a pass is, and what passes know besides the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.plan.schedule import HEAD, Tile

# Node metadata that passes write and later stages read.
OPERATOR = "zinf_operator"  # number of the operator that a node belongs to; HEAD before the first
MADE_BY = "zinf_made_by"  # name of the pass that made the node


@dataclass(frozen=True)
class HeadTransfer:
    """A transfer that a graph needs before it begins: `operators_early` operators before its first."""

    op: torch._ops.OpOverload
    token: str
    operators_early: int


@dataclass
class GraphContext:
    """What the passes know of one graph besides its nodes.

    Attributes:
        kind: which graph it is.
        config: the options in force.
        tiles: by the name of the placeholder that carries the tile's token.
        gradients: joint and backward: by position among the outputs of backward, the token of the tile whose gradient
            it is.
        backward_outputs: joint only: how many of its last outputs are those of backward.
        successor_head: what the next graph needs at its head; this graph starts it in its last operators.
        provided: what the passes so far have established.
    """

    kind: Literal["joint", "forward", "backward", "inference"]
    config: Config
    tiles: dict[str, Tile]
    gradients: dict[int, str] = field(default_factory=dict)
    backward_outputs: int = 0
    successor_head: tuple[HeadTransfer, ...] = ()
    provided: set[str] = field(default_factory=set)

    @property
    def budget(self) -> int | None:
        """Bytes that may be in flight at once (see [Note: bytes in flight]); None: no limit."""
        return min(filter(None, (self.config.device_memory, self.config.host_memory)), default=None)

    def tile_of(self, node: fx.Node) -> Tile:
        """The tile that a `zinf` node is about."""
        return self.tiles[node.args[0].name]


class Pass(Protocol):
    """One rewrite of a graph: a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]
    provides: ClassVar[tuple[str, ...]]
    changes_numerics: ClassVar[bool]

    def __call__(self, graph: fx.Graph, context: GraphContext) -> None:
        """Rewrite `graph` in place."""


def nodes_calling(graph: fx.Graph, *targets: object) -> Iterator[fx.Node]:
    """The nodes that call one of `targets`, in graph order."""
    return (node for node in list(graph.nodes) if node.op == "call_function" and node.target in targets)


def is_compute(node: fx.Node) -> bool:
    """Whether the node computes something: neither a transfer nor an input, constant or output."""
    return node.op in ("call_function", "call_module", "call_method") and node.target not in (ops.gather, *ops.LOWERED)


def operator_of(node: fx.Node) -> int:
    """The number of the operator that a node belongs to."""
    return node.meta.get(OPERATOR, HEAD)
