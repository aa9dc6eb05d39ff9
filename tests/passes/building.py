"""Builds small graphs by hand, for the golden tests: `before` and `after` stand in the test as text."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent
from typing import Any

import torch
from passes.capturing import copy_graph
from passes.reference import Reference, assert_close, assert_same
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.passes.ir.framework import GraphContext, Pass
from zinf_fx.passes.ir.printer import print_graph
from zinf_fx.passes.pipeline import run_passes
from zinf_fx.plan.schedule import Tile

aten = torch.ops.aten


class Builder:
    """A graph of one kind with the given tiles, by parameter name; `frozen` ones have no gradient."""

    def __init__(
        self,
        kind: str = "forward",
        tiles: dict[str, tuple[int, ...]] | None = None,
        *,
        provided: tuple[str, ...] = (),
        frozen: tuple[str, ...] = (),
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.module = fx.GraphModule({}, fx.Graph())
        self.graph = fx.Graph(self.module)
        config = Config(placement="infinity-nvme", **options)
        self._fake = FakeTensorMode()
        self._tokens: dict[str, fx.Node] = {}
        of_token: dict[str, Tile] = {}
        for name, shape in (tiles or {}).items():
            node = self._placeholder(f"primals_{len(self._tokens) + 1}", (), torch.int64)
            tier = None if name in frozen else "host"
            of_token[node.name] = Tile(name, shape, dtype, "nvme", tier, state_tier=None if name in frozen else "nvme")
            self._tokens[name] = node
        self.context = GraphContext(kind, config, of_token, provided=frozenset(provided))

    def input(self, *shape: int, name: str = "primals_x", dtype: torch.dtype = torch.float32) -> fx.Node:
        return self._placeholder(name, shape, dtype)

    def token(self, name: str) -> fx.Node:
        return self._tokens[name]

    def gather(self, name: str) -> fx.Node:
        tile = self.context.tiles[self._tokens[name].name]
        return self.call(ops.gather, self._tokens[name], list(tile.shape), tile.dtype, torch.device("cpu"))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node and, by running it on fake tensors, the metadata of its result."""
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._fake:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def returns(self, *results: fx.Node | None, gradients: dict[int, str] | None = None, backward: int = 0) -> None:
        self.graph.output(results)
        tokens = {p: self._tokens[name].name for p, name in (gradients or {}).items()}
        self.knows(gradients=tokens, backward_outputs=backward)

    def knows(self, **more: Any) -> None:
        """Say what the context says besides."""
        self.context = replace(self.context, **more)

    def run(self, *passes: Pass) -> None:
        self.context = run_passes(self.graph, self.context, passes)

    @property
    def text(self) -> str:
        return print_graph(self.graph, self.context)

    def check(self, *passes: Pass, before: str | None = None, after: str) -> None:
        """The passes turn `before` into `after`, and compute the same: bitwise, if they say that they do."""
        if before is not None:
            assert self.text == dedent(before).lstrip("\n")
        self.check_values(*passes)
        assert self.text == dedent(after).lstrip("\n")

    def check_values(self, *passes: Pass) -> None:
        """The passes change nothing of what the graph computes: nothing at all, if they say that they don't."""
        same = assert_close if any(pass_.changes_numerics for pass_ in passes) else assert_same
        graph, context = copy_graph(self.graph), self.context
        self.run(*passes)
        same(self._values(self.graph, self.context), self._values(graph, context))

    @staticmethod
    def moved(tile: Tile, tier: str) -> Tile:
        """Return the tile, and its gradient, on another tier."""
        return replace(tile, tier=tier, gradient_tier=tile.gradient_tier and tier)

    def _values(self, graph: fx.Graph, context: GraphContext) -> Any:
        generator = torch.Generator().manual_seed(5)
        shapes = {member.name: (member.shape, t.dtype) for t in context.tiles.values() for member in t.members or (t,)}
        parameters = {name: _of_tile(shape, dtype, generator) for name, (shape, dtype) in sorted(shapes.items())}
        inputs = [_random(node.meta["val"], generator) for node in graph.find_nodes(op="placeholder")]
        torch.manual_seed(7)
        outcome = Reference(self.module, graph, context, parameters).run_to_outcome(inputs)
        return [outcome.results, outcome.gradients, outcome.inputs]

    def _placeholder(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(name)
        with self._fake:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node


def _random(fake: FakeTensor, generator: torch.Generator) -> torch.Tensor:
    if fake.is_floating_point():
        return torch.randn(fake.shape, generator=generator).to(fake.dtype)
    return torch.randint(0, 3, fake.shape, generator=generator).to(fake.dtype)


def _of_tile(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return values of a tile. Bytes are such that any four of them are a finite number in fp32, as a scale is."""
    if dtype is torch.uint8:
        return torch.randint(0, 64, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)
