"""Functional collectives in captured graphs: those of tensor parallelism, which models bring along.

[Note: collectives under way]
A collective's result is not there, and its input is still read, until `wait_tensor` returns. So the result of the
collective itself is nobody's memory: it is neither saved nor sent anywhere, and stands for its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

WAIT = torch.ops._c10d_functional.wait_tensor.default


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional" and target is not WAIT


def group_of(node: fx.Node) -> Any:
    """The group of a collective, or its name."""
    return argument_of(node, "group_name")


def argument_of(node: fx.Node, name: str) -> Any:
    """The argument of an operator's call that its schema calls so; None: it is not given."""
    assert isinstance(node.target, torch._ops.OpOverload)
    position = [argument.name for argument in node.target._schema.arguments].index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def collectives_of(graph: fx.Graph) -> list[fx.Node]:
    """The collectives that the graph starts, in order."""
    return [node for node in graph.nodes if is_collective(node)]
