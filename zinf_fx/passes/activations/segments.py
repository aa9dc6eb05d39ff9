"""The forward part of a joint graph, cut into segments that backward can compute again (ZeRO-Infinity, section 3)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx import ops
from zinf_fx.passes.ir.aliases import memory_node
from zinf_fx.passes.ir.collectives import WAIT, is_collective
from zinf_fx.passes.ir.framework import GraphContext, bytes_computed, is_compute, results_of
from zinf_fx.passes.ir.randomness import is_random, source_of
from zinf_fx.passes.ir.tile_values import tile_values
from zinf_fx.passes.ir.values import last_readers

# The first number in a parameter's name is that of its layer, and what stands before it tells stacks of layers apart.
_LAYER = re.compile(r"(?:^|(.*?)\.)(\d+)(?:\.|$)")


class Segments:
    """The compute nodes that the results of forward depend on, less the values of tiles, and where they can be cut.

    Attributes:
        forward: the nodes, in graph order.
        made: for each position, the nodes whose memory is computed there; that of a tuple's members is with the tuple.
        crossing: for each position, the nodes up to it whose memory a later one reads: what is saved at a cut there.
    """

    def __init__(self, graph: fx.Graph, context: GraphContext) -> None:
        self._tiles = tile_values(graph)
        self.forward = _forward_nodes(graph, context.backward_outputs, self._tiles)
        self._memory = {node: memory_node(node) for node in self.forward}
        self.made = _made(self._memory)
        self.crossing = _crossing(self._memory, self.made)
        self._context = context

    def at_minima(self) -> list[int]:
        """Positions after which fewer bytes cross than at their neighbours: between the layers of a transformer, where
        only the residual stream does."""
        values = [sum(map(bytes_computed, nodes)) for nodes in self.crossing]
        minima = []
        falling, candidate = True, None
        for position, value in enumerate(values):
            before = values[position - 1] if position else None
            # Behind a collective, so that it is not repeated: what it started with is as large.
            ends = falling and value == before and self.forward[position].target is WAIT
            if before is None or value < before or ends:
                falling, candidate = True, position
            elif value > before:
                if falling and candidate is not None and candidate > 0:
                    minima.append(candidate)
                falling = False
        return minima

    def before_layers(self) -> list[int]:
        """For each layer that parameters' names tell of (`blocks.3.mlp.up.weight`), in the order of their use, the
        position after which it begins: where least crosses, between the uses of its parameters and of those before."""
        begun: set[tuple[str, str] | None] = {None}
        boundaries, last_use = [], -1
        for position, node in enumerate(self.forward):
            for layer in map(self._layer_of, self._parameters_of(node)):
                between = range(max(last_use, 0), position)
                if layer not in begun and between:
                    boundaries.append(min(between, key=lambda p: sum(map(bytes_computed, self.crossing[p]))))
                begun.add(layer)
                last_use = position
        return boundaries

    def _parameters_of(self, node: fx.Node) -> Iterable[fx.Node]:
        """The gathers, or members of packs, whose values a node computes with."""
        of_one = (ops.gather, ops.member)
        for source in node.all_input_nodes:
            while source in self._tiles and source.target not in of_one:
                source = source.all_input_nodes[0]
            if source.target in of_one:
                yield source

    def _layer_of(self, source: fx.Node) -> tuple[str, str] | None:
        if source.target is ops.member:
            name = self._context.member_of(source).name
        else:
            name = self._context.tile_of(source).name
        matched = _LAYER.match(name)
        return (matched[1] or "", matched[2]) if matched else None

    def tag(self, cuts: Sequence[int], recomputed: Collection[int]) -> None:
        """Tell the partitioner to compute the segments in `recomputed` again, and to save what crosses the cuts around
        them, and all of the others. Random numbers are saved, and so is the result of what has effects. A decision of
        the user's `torch.utils.checkpoint` stands.
        """
        around = {cut for number, cut in enumerate(cuts) if number in recomputed or number + 1 in recomputed}
        saved = set().union(*(self.crossing[cut] for cut in around))
        for number, nodes in enumerate(self.between(cuts)):
            for node in nodes:
                if "recompute" not in node.meta:
                    kept = is_random(node) or has_effects(node) or node in saved or number not in recomputed
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
                    node.meta["ac_graph_id"] = number + 1

    def needed(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes that made the memory which backward reads of the results of `nodes`, in the order of these."""
        read = (n for n in nodes if any(user not in self._memory and is_compute(user) for user in n.users))
        return [memory for memory in dict.fromkeys(map(self._memory.__getitem__, read)) if memory in self._memory]

    def between(self, cuts: Sequence[int]) -> list[list[fx.Node]]:
        """The nodes of each segment, in order."""
        segments: list[list[fx.Node]] = [[]]
        number_of: dict[fx.Node, int] = {}
        ends = set(cuts)
        for position, node in enumerate(self.forward):
            # A member of a tuple is computed with the tuple.
            number_of[node] = number = number_of.get(source_of(node), len(segments) - 1)
            segments[number].append(node)
            if position in ends:
                segments.append([])
        return segments


def has_effects(node: fx.Node) -> bool:
    """Whether computing the node again would repeat an effect; AOTAutograd of torch 2.15 refuses a graph that asks for
    it, and that of earlier versions saves the result whatever the tag."""
    return source_of(node).target is torch.ops.higher_order.with_effects


def _forward_nodes(graph: fx.Graph, backward_outputs: int, tiles: Collection[fx.Node]) -> list[fx.Node]:
    outputs = results_of(graph)
    needed = {n for n in outputs[: len(outputs) - backward_outputs] if isinstance(n, fx.Node)}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    # What else a needed node computes may be for backward alone: a mask, the statistics of a norm.
    return [n for n in graph.nodes if is_compute(n) and n not in tiles and (n in needed or source_of(n) in needed)]


def _made(memory: Mapping[fx.Node, fx.Node]) -> list[list[fx.Node]]:
    """`memory`: the nodes of forward, in order, each with the one that made its memory."""
    position_of = {node: position for position, node in enumerate(memory)}
    made: list[list[fx.Node]] = [[] for _ in memory]
    for node, maker in memory.items():
        if maker is node and bytes_computed(node) and not is_collective(node):
            made[position_of[source_of(node)]].append(node)
    return made


def _crossing(memory: Mapping[fx.Node, fx.Node], made: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    position_of = {node: position for position, node in enumerate(memory)}
    last_use = {node: position_of[reader] for node, reader in last_readers(memory).items()}
    crossing: list[list[fx.Node]] = [[] for _ in memory]
    for position, nodes in enumerate(made):
        for node in nodes:
            for later in range(position, last_use.get(node, position)):
                crossing[later].append(node)
    return crossing
