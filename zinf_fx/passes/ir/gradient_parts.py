"""The gradient of a parameter that has several tiles: in a graph, a sum of concatenations of one part per tile.

There is a concatenation for each use of the parameter. Nothing computes them, nor their sum: the parts leave one by
one, and meet where gradients live.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from zinf_fx.errors import StoredTensorError
from zinf_fx.passes.ir.framework import GraphContext, TileKey, arguments_of, results_of

aten = torch.ops.aten


class GradientPart(NamedTuple):
    """What one use contributes to the gradient of one tile, and the concatenation that it is in (None: it is all)."""

    key: TileKey
    node: fx.Node
    whole: fx.Node | None


def gradient_outputs(graph: fx.Graph, context: GraphContext) -> dict[int, fx.Node]:
    """Return the outputs of backward that are gradients of stored parameters, by position."""
    results = results_of(graph)
    first = len(results) - context.backward_outputs if context.kind == "joint" else 0
    return {p: results[first + p] for p in context.gradients if results[first + p] is not None}


def check_dense(graph: fx.Graph, context: GraphContext) -> None:
    """Raises StoredTensorError where a gradient of a captured graph is sparse."""
    for position, gradient in gradient_outputs(graph, context).items():
        value = gradient.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise StoredTensorError(
                f"the gradient of '{context.tiles[context.gradients[position]].name}' has layout {value.layout}, and "
                "only dense ones can be moved: make its module with sparse=False"
            )


def parts_of(gradient: fx.Node, token: str, context: GraphContext) -> list[GradientPart]:
    """The parts of the gradient of one parameter."""
    if token not in context.divided:
        return [GradientPart(TileKey(token), gradient, None)]
    keys = context.tiles_of(token)
    return [
        GradientPart(key, part, whole)
        for whole in assembly_of(gradient)
        if whole.target is aten.cat.default
        for key, part in zip(keys, arguments_of(whole)[0], strict=True)
    ]


def assembly_of(gradient: fx.Node) -> Iterator[fx.Node]:
    """The sums and concatenations that a divided gradient is made by, each before what it is made from."""
    pending = [gradient]
    while pending:  # a sum is as deep as there are uses
        node = pending.pop()
        yield node
        if node.target is aten.add.Tensor:
            pending += reversed(arguments_of(node))


def assemblies(graph: fx.Graph, context: GraphContext) -> set[fx.Node]:
    """All nodes that only put gradients together."""
    return {
        node
        for position, gradient in gradient_outputs(graph, context).items()
        if context.gradients[position] in context.divided
        for node in assembly_of(gradient)
    }
