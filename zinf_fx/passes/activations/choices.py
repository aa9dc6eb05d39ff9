"""What a plan's choices about activations are in a graph: read off the tags of its nodes, and put there again."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx.errors import PlanError
from zinf_fx.passes.activations.offload import LEAVES
from zinf_fx.passes.ir.framework import GraphContext, Pass
from zinf_fx.plan.plan import Choice


@dataclass(frozen=True)
class FollowActivations(Pass):
    """Tag what is saved, what is recomputed and what leaves, as a plan's choices say."""

    name = "follow_activations"
    provides = ("activations",)

    choices: tuple[Choice, ...]

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        nodes = list(graph.nodes)
        for choice in self.choices:
            if choice.end > len(nodes):
                raise PlanError(f"the plan chooses for node {choice.end - 1}, and the graph has {len(nodes)}")
            for node in nodes[choice.first : choice.end]:
                if choice.recomputed is not None and "recompute" not in node.meta:
                    tag = CheckpointPolicy.MUST_RECOMPUTE if choice.recomputed else CheckpointPolicy.MUST_SAVE
                    node.meta["recompute"] = tag
                    if choice.segment is not None:
                        node.meta["ac_graph_id"] = choice.segment
                if choice.leaves is not None:
                    node.meta[LEAVES] = choice.leaves
        return context


def tagged(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes for which it is decided whether they are recomputed."""
    return frozenset(node for node in graph.nodes if "recompute" in node.meta)


def choices_in(graph: fx.Graph, before: frozenset[fx.Node]) -> tuple[Choice, ...]:
    """What was chosen for a graph's nodes, whether those that were tagged `before` are recomputed excepted."""

    def chosen(numbered: tuple[int, fx.Node]) -> tuple[bool | None, int | None, bool | None]:
        meta = numbered[1].meta
        if "recompute" not in meta or numbered[1] in before:
            return None, None, meta.get(LEAVES)
        return meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE, meta.get("ac_graph_id"), meta.get(LEAVES)

    choices = []
    for (recomputed, segment, leaves), alike in groupby(enumerate(list(graph.nodes)), chosen):
        numbers = [number for number, _ in alike]
        if recomputed is not None or leaves is not None:
            choices.append(Choice(numbers[0], numbers[-1] + 1, recomputed, segment, leaves))
    return tuple(choices)
