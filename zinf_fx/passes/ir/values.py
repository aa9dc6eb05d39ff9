"""Bytes of values that a graph computes and needs no more at its end: what operators compute with, and hand on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from zinf_fx.passes.ir.aliases import memory_node
from zinf_fx.passes.ir.collectives import is_collective
from zinf_fx.passes.ir.framework import bytes_computed, is_compute, operator_of


class Value(NamedTuple):
    """The memory of a value, from the node that computes it to the last one that reads it."""

    node: fx.Node
    last: fx.Node

    @property
    def nbytes(self) -> int:
        """Its size."""
        return bytes_computed(self.node)


def values_in(graph: fx.Graph) -> Iterator[Value]:
    """The values of a graph, in order. Neither tiles nor inputs are among them, nor what the graph returns or saves."""
    memory = {node: memory_node(node) for node in graph.nodes}
    last = last_readers(memory)
    for node in graph.nodes:
        counts = is_compute(node) and not is_collective(node) and memory[node] is node
        if counts and node in last and last[node].op != "output":
            yield Value(node, last[node])


def last_readers(memory: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the last node that reads each memory. `memory`: nodes in order, each with the one that made its memory."""
    last: dict[fx.Node, fx.Node] = {}
    for node in memory:
        for source in node.all_input_nodes:
            last[memory.get(source, source)] = node
            if is_collective(source):  # see [Note: collectives under way]
                last |= {memory.get(read, read): node for read in source.all_input_nodes}
    return last


def values_by_operator(graph: fx.Graph) -> dict[int, int]:
    """Return, by operator, the most bytes of values that are there at once while it computes."""
    begun: defaultdict[fx.Node, int] = defaultdict(int)
    ended: defaultdict[fx.Node, int] = defaultdict(int)
    for value in values_in(graph):
        begun[value.node] += value.nbytes
        ended[value.last] += value.nbytes
    by_operator: Counter[int] = Counter()
    there = 0
    for node in graph.nodes:
        there += begun[node]
        if is_compute(node):
            by_operator[operator_of(node)] = max(by_operator[operator_of(node)], there)
        there -= ended[node]
    return dict(by_operator)


def handed_on(graph: fx.Graph, operators: int, without: Collection[fx.Node]) -> list[int]:
    """For each operator, bytes of values that are there when it has computed, and that a later one reads. `without`:
    nodes whose values don't count."""
    changes = [0] * (operators + 1)
    for value in values_in(graph):
        first, last = (max(operator_of(node), 0) for node in (value.node, value.last))
        if value.node not in without:
            changes[first] += value.nbytes
            changes[last] -= value.nbytes
    return list(accumulate(changes))[:operators]
