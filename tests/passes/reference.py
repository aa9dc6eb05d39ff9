"""Runs any graph between two passes with the plainest meaning of the zinf operations, and catches what is forbidden.

A waited-for tile is a buffer of its own, filled with NaN when the tile is released: whatever reads it later, directly
or through an alias, shows in the results. The token of an activation that left is the activation itself, flat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from zinf_fx import ops
from zinf_fx.passes.ir.framework import GraphContext
from zinf_fx.plan.schedule import Tile


@dataclass
class Outcome:
    """Holds what a graph computed: its results without gradients of tiles, and those by parameter name."""

    results: list[Any]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)


class Reference(fx.Interpreter):
    """`parameters`: full values by tile name."""

    def __init__(
        self, module: fx.GraphModule, graph: fx.Graph, context: GraphContext, parameters: dict[str, torch.Tensor]
    ) -> None:
        super().__init__(module, graph=graph)
        self._context = context
        self._parameters = parameters
        self._progress: dict[str, list[object]] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._arrived: dict[str, dict[int, torch.Tensor]] = {}
        self._packs: dict[str, Tile] = {}

    def run_node(self, node: fx.Node) -> Any:
        if node.target in (ops.pack, ops.member, ops.together):
            return self._of_pack(node)
        if node.target is not ops.gather and node.target not in ops.LOWERED:
            return super().run_node(node)
        tile = self._context.tile_of(node)
        progress = self._progress.setdefault(tile.label, [])
        if node.target is ops.offload_activation:
            return self.fetch_args_kwargs_from_env(node)[0][0].clone()
        if node.target is ops.gather:
            return self._value(tile, node)
        if ops.EVENT in node.meta and node.meta[ops.EVENT].for_backward:
            return None
        if node.target in ops.TRANSFERS:
            assert progress == list(ops.TRANSFERS[: len(progress)]), f"{node.format_node()} after {progress}"
            assert node.target is ops.TRANSFERS[len(progress)], f"{node.format_node()} after {progress}"
            progress.append(node.target)
        elif node.target is ops.wait:
            assert progress == list(ops.TRANSFERS), f"{node.format_node()} after {progress}"
            progress.append(ops.wait)
            self._buffers[tile.label] = self._value(tile, node)
            return self._buffers[tile.label]
        elif node.target is ops.release:
            assert progress[-1:] == [ops.wait], f"{node.format_node()} after {progress}"
            progress.clear()
            poison(self._buffers.pop(tile.label))
        else:
            _, value = self.fetch_args_kwargs_from_env(node)[0]
            if node.target is ops.reduce_scatter:
                return value
            arrived = self._arrived.setdefault(tile.name, {})
            assert tile.rows or not arrived, f"a second gradient: {node.format_node()}"
            self._packs[tile.name] = tile
            arrived[tile.start] = arrived[tile.start] + value if tile.start in arrived else value.clone()
        return None

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Return what was offloaded, by parameter name; ranges of rows put together."""
        gradients: dict[str, torch.Tensor] = {}
        for name, parts in self._arrived.items():
            whole = parts[0] if len(parts) == 1 else torch.cat([part for _, part in sorted(parts.items())])
            gradients |= _by_member(self._packs[name], whole)
        return gradients

    def _of_pack(self, node: fx.Node) -> torch.Tensor | None:
        """What the nodes of packs mean: parameters lie one behind the other."""
        if node.target is ops.pack:
            return None
        (value, *rest), options = self.fetch_args_kwargs_from_env(node)
        if node.target is ops.member:
            return value[options["start"] :][: math.prod(rest[0])].view(rest[0])
        flat = value[0].new_zeros(rest[1])
        for part, start in zip(value, rest[0], strict=True):
            flat[start : start + part.numel()] = part.flatten()
        return flat

    def _value(self, tile: Tile, node: fx.Node) -> torch.Tensor:
        if tile.members:
            flat = torch.zeros(tile.shape, dtype=tile.dtype)
            for member in tile.members:
                flat[member.start :][: member.numel] = self._parameters[member.name].flatten()
            return flat
        value = self.env[node.args[0]] if tile.activation else self._parameters[tile.name]
        return (value if tile.rows is None else value[slice(*tile.rows)]).clone()

    def check_all_given_back(self) -> None:
        assert not self._buffers, f"never released: {sorted(self._buffers)}"

    def run_to_outcome(self, inputs: list[Any]) -> Outcome:
        """Results and gradients, wherever the graph puts the gradients."""
        results = list(self.run(*inputs))
        self.check_all_given_back()
        first = len(results) - self._context.backward_outputs if self._context.kind == "joint" else 0
        gradients = {name: g.clone() for name, g in self.gradients.items()}
        for position, token in self._context.gradients.items():
            if (gradient := results[first + position]) is not None:
                gradients |= _by_member(self._context.tiles[token], gradient.clone())
            results[first + position] = None
        return Outcome([r.clone() if isinstance(r, torch.Tensor) else r for r in results], gradients, inputs)


def _by_member(tile: Tile, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a value of a tile by the names of the parameters in it."""
    if not tile.members:
        return {tile.name: value}
    return {member.name: value[member.start :][: member.numel].view(member.shape) for member in tile.members}


def poison(buffer: torch.Tensor) -> None:
    """Make any later read of `buffer` visible."""
    if buffer.dtype is torch.bool:
        buffer.logical_not_()
    else:
        buffer.fill_(torch.nan if buffer.is_floating_point() or buffer.is_complex() else torch.iinfo(buffer.dtype).min)


def assert_close(ours: Any, theirs: Any, what: str = "result", tolerance: float = 1e-4) -> None:
    """Assert equality within rounding of tensors, or of lists and mappings of them; of bf16, within that of bf16."""
    dtypes = {value.dtype for value in tree_leaves(theirs) if isinstance(value, torch.Tensor)}
    tolerance = 0.02 if torch.bfloat16 in dtypes else tolerance
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def assert_same(ours: Any, theirs: Any, what: str = "result") -> None:
    """Assert bitwise equality of tensors, or of lists and mappings of them."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), f"{what} is {ours!r}"
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, f"{what}: {ours.dtype} {tuple(ours.shape)}"
        assert torch.equal(ours, theirs), f"{what} differs by {(ours - theirs).abs().max()}"
    elif isinstance(theirs, dict):
        assert list(sorted(ours)) == list(sorted(theirs)), f"{what}: {sorted(ours)} instead of {sorted(theirs)}"
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{what} {key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), f"{what}: {len(ours)} instead of {len(theirs)}"
        for index, (item, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(item, other, f"{what} {index}")
    else:
        assert ours == theirs, f"{what} is {ours!r} instead of {theirs!r}"
