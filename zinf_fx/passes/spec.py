"""The invariants of a planned graph, checked after every pass.

| rule | from which pass on |
|---|---|
| placeholders are those of the captured graph | always |
| operator numbers never fall along the graph | operators |
| no gather is left; each wait has one fetch, upload and all-gather before it, in this order | lowered |
| each tile is released once, after its last use; no result of the graph shares memory with a tile | lowered |
| each trainable tile's gradient is reduce-scattered once and offloaded once, and is no output | gradients_offloaded |
| bytes of tiles in flight stay within the budget | prefetched |
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from torch import fx

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.aliases import aliases_of
from zinf_fx.passes.framework import OPERATOR, GraphContext, nodes_calling, operator_of


def check(graph: fx.Graph, context: GraphContext, placeholders: tuple[str, ...], after: str) -> None:
    """Check every rule that holds after the pass named `after`.

    Raises: PlanError naming the pass, the rule, the node and its neighbours.
    """
    violation = _Reporter(context.kind, after)
    if tuple(n.name for n in graph.find_nodes(op="placeholder")) != placeholders:
        violation("the placeholders changed", next(iter(graph.nodes)))
    if "operators" in context.provided:
        _check_operators(graph, violation)
    if "lowered" in context.provided:
        _check_journeys(graph, context, violation)
    if "gradients_offloaded" in context.provided:
        _check_gradients(graph, context, violation)


class _Reporter:
    def __init__(self, kind: str, after: str) -> None:
        self._where = f"{kind} graph after pass '{after}'"

    def __call__(self, rule: str, node: fx.Node) -> NoReturn:
        neighbours = f"before: {node.prev.format_node()}\n  here:   {node.format_node()}\n  after:  "
        neighbours += str(node.next.format_node())
        raise PlanError(f"{self._where}: {rule}\n  {neighbours}")


def _check_operators(graph: fx.Graph, violation: _Reporter) -> None:
    current = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if OPERATOR not in node.meta:
            violation("a node belongs to no operator", node)
        if current is not None and operator_of(node) < current:
            violation(f"operator {operator_of(node)} follows operator {current}", node)
        current = operator_of(node)


def _check_journeys(graph: fx.Graph, context: GraphContext, violation: _Reporter) -> None:
    for node in nodes_calling(graph, ops.gather):
        violation("a gather was not lowered", node)
    order = {node: position for position, node in enumerate(graph.nodes)}
    steps: dict[tuple[str, object], list[fx.Node]] = {}
    for node in nodes_calling(graph, *ops.TRANSFERS, ops.wait, ops.release):
        if not node.kwargs.get("turn"):
            steps.setdefault((node.args[0].name, node.target), []).append(node)
    output = next(iter(graph.find_nodes(op="output")))
    for token, target in list(steps):
        if target is not ops.wait:
            if (token, ops.wait) not in steps:
                violation("a transfer of a tile that is never waited for", steps[token, target][0])
            continue
        journey = []
        for step in (*ops.TRANSFERS, ops.wait, ops.release):
            nodes = steps.get((token, step), [])
            if len(nodes) != 1:
                name = context.tiles[token].name
                violation(f"tile '{name}' has {len(nodes)} {step} where one is due", steps[token, ops.wait][0])
            journey.append(nodes[0])
        if journey != sorted(journey, key=order.__getitem__):
            violation("a tile's journey is out of order", journey[3])
        release = journey[-1]
        for alias in aliases_of(journey[3]):
            for user in alias.users:
                if user is output:
                    violation("a result of the graph shares memory with a tile", alias)
                if order[user] > order[release]:
                    violation(f"reads a tile after its release ({release.name})", user)


def _check_gradients(graph: fx.Graph, context: GraphContext, violation: _Reporter) -> None:
    output = next(iter(graph.find_nodes(op="output")))
    reduced = Counter(n.args[0].name for n in nodes_calling(graph, ops.reduce_scatter))
    offloaded = Counter(n.args[0].name for n in nodes_calling(graph, ops.offload))
    for position, token in context.gradients.items():
        if output.args[0][position] is not None:
            violation(f"the gradient of '{context.tiles[token].name}' is still an output", output)
    for node in nodes_calling(graph, ops.reduce_scatter, ops.offload):
        token = node.args[0].name
        if reduced[token] != 1 or offloaded[token] != 1:
            violation(f"the gradient of '{context.tiles[token].name}' is not moved exactly once", node)
