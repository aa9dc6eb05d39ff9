"""Which values are equal on all ranks of tensor parallelism: found by following the data, and never guessed.

[Note: equal values]
Ranks that divide parameters run graphs that are alike. Equal are, by assumption that the first call checks, what the
caller gives, and ordinary parameters; DTensor parameters that every rank has; results of all-reduces and all-gathers
over these ranks, whatever goes in; and what the same operation computes of equal values alone, unless it draws random
numbers. An operation with another constant on another rank (which rows of a vocabulary are here, say) is not the same.
An ordinary parameter stays equal only if its gradient is: else neither it nor what depends on it is taken for equal.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from zinf_fx.passes.ir.collectives import group_of, is_collective
from zinf_fx.passes.ir.framework import GraphContext, results_of
from zinf_fx.passes.ir.randomness import is_random

EQUAL = "zinf_equal"
"""Node metadata: whether the node's value is equal on all ranks of tensor parallelism."""

_COLLECTIVES = torch.ops._c10d_functional
_EQUAL_RESULTS = (
    _COLLECTIVES.all_reduce.default,
    _COLLECTIVES.all_gather_into_tensor.default,
    _COLLECTIVES.broadcast.default,
)


@dataclass(frozen=True)
class Replicas:
    """What is known of the ranks that divide parameters.

    Attributes:
        group: theirs, as collectives of the graph name it.
        divided: names of the placeholders whose values differ: parameters of which each rank has a part.
        ordinary: names of the placeholders of parameters that are no DTensors.
        differing: numbers of the nodes that are not the same in all ranks' graphs.
    """

    group: object
    divided: frozenset[str]
    ordinary: frozenset[str]
    differing: frozenset[int]


def mark_equal(graph: fx.Graph, context: GraphContext, replicas: Replicas) -> None:
    """Mark the nodes of a joint graph that no pass has changed yet. See [Note: equal values]."""
    results = results_of(graph)
    gradients = results[len(results) - context.backward_outputs :]
    apart = set(replicas.divided)
    while True:
        equal = _equal(graph, apart, replicas)
        parting = {
            token
            for position, token in context.gradients.items()
            if token in replicas.ordinary and token not in apart and gradients[position] not in equal
        }
        if not parting:
            break
        apart |= parting
    for node in graph.nodes:
        node.meta[EQUAL] = node in equal


def _equal(graph: fx.Graph, apart: Collection[str], replicas: Replicas) -> set[fx.Node]:
    equal: set[fx.Node] = set()
    for number, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            if node.name not in apart:
                equal.add(node)
        elif node.op != "call_function":
            continue  # a constant of the graph may be another one elsewhere
        elif is_collective(node):
            if node.target in _EQUAL_RESULTS and group_of(node) == replicas.group:
                equal.add(node)
        elif number not in replicas.differing and equal.issuperset(node.all_input_nodes) and _is_deterministic(node):
            equal.add(node)
    return equal


def _is_deterministic(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return not is_random(node) and torch.Tag.nondeterministic_bitwise not in getattr(node.target, "tags", ())
