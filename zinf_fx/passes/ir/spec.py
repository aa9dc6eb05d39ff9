"""The invariants of a graph between two passes, checked after every pass.

Each rule holds from the pass on that provides what `since` names (None: always).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.ir.aliases import aliases_of, readers_of
from zinf_fx.passes.ir.framework import (
    OPERATOR,
    GraphContext,
    TileKey,
    events_in,
    key_of,
    nodes_calling,
    operand,
    operator_of,
)
from zinf_fx.passes.ir.gradient_parts import gradient_outputs, parts_of
from zinf_fx.passes.ir.in_flight import Ledger, operators_in, outline, spans
from zinf_fx.passes.ir.printer import print_around
from zinf_fx.plan.lifetimes import OutOfOrder, UnfinishedLifetime
from zinf_fx.plan.schedule import PROLOGUE
from zinf_fx.plan.spec import StepGraphs, violations

Violations = Iterator[tuple[str, fx.Node]]


@dataclass(frozen=True)
class Facts:
    """What the rules look at, found once per check."""

    graph: fx.Graph
    context: GraphContext
    placeholders: tuple[str, ...]

    @cached_property
    def output(self) -> fx.Node:
        return self.graph.output_node()

    @cached_property
    def events(self) -> list[fx.Node]:
        """The nodes that are events."""
        return events_in(self.graph)

    @cached_property
    def step(self) -> StepGraphs:
        """The graph as the only one that is known of a step."""
        return StepGraphs((outline(self.graph, self.context),), False)

    def name(self, about: fx.Node | int) -> str:
        """The name of the tile that a node is about, or that an index stands for."""
        tile = self.context.table[about] if isinstance(about, int) else self.context.tile_of(about)
        return f"'{tile.label}'"

    @cached_property
    def gradients(self) -> dict[int, fx.Node]:
        """The outputs of backward that are gradients of parameters, by position."""
        return gradient_outputs(self.graph, self.context)


class GraphRule(NamedTuple):
    """One invariant. `check` finds what breaks it: what is wrong, and at which node."""

    text: str
    since: str | None
    check: Callable[[Facts], Violations]


def check(graph: fx.Graph, context: GraphContext, placeholders: tuple[str, ...], after: str) -> None:
    """Check every rule that holds after the pass named `after`.

    Raises: PlanError naming the pass, the rule, the node and its neighbours.
    """
    facts = Facts(graph, context, placeholders)
    for rule in RULES:
        if rule.since is not None and rule.since not in context.provided:
            continue
        for what, node in rule.check(facts):
            raise PlanError(
                f"{context.kind} graph after pass '{after}': {rule.text}, but {what}\n"
                + print_around(graph, context, node)
            )


def _placeholders(facts: Facts) -> Violations:
    names = tuple(node.name for node in facts.graph.find_nodes(op="placeholder"))
    if names != facts.placeholders:
        yield f"they are {names} instead of {facts.placeholders}", next(iter(facts.graph.nodes))


def _tokens(facts: Facts) -> Violations:
    for node in facts.graph.find_nodes(op="placeholder"):
        if node.name in facts.context.tiles:
            for user in node.users:
                if user is not facts.output and user.target is not ops.gather and user.target not in ops.LOWERED:
                    yield f"the token of '{facts.context.tiles[node.name].name}' is computed with", user


def _operators(facts: Facts) -> Violations:
    current = PROLOGUE
    for node in facts.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if OPERATOR not in node.meta and ops.EVENT not in node.meta:
            yield "a node belongs to none", node
        elif operator_of(node) not in (current, current + 1):
            before = f"operator {current}" if current != PROLOGUE else "the prologue"
            yield f"operator {operator_of(node)} follows {before}", node
        current = operator_of(node)


def _reductions(facts: Facts) -> Violations:
    if "gradients_offloaded" in facts.context.provided:
        return
    for position, token in facts.context.gradients.items():
        gradient = facts.gradients.get(position)
        parts = parts_of(gradient, token, facts.context) if gradient is not None else []
        shards = [p.node for p in parts if p.node.target is ops.reduce_scatter and key_of(p.node) == p.key]
        if not shards or len(shards) < len(parts):
            yield f"output {position} of backward isn't the one of '{facts.context.tiles[token].name}'", facts.output


def _one_reduction(facts: Facts) -> Violations:
    """Several uses of a parameter in tiles give a gradient of each tile each."""
    reduced: set[TileKey] = set()
    for node in nodes_calling(facts.graph, ops.reduce_scatter):
        key = key_of(node)
        if key in reduced and key.token not in facts.context.divided:
            yield f"that of {facts.name(node)} is once more", node
        reduced.add(key)


def _no_gathers(facts: Facts) -> Violations:
    for node in nodes_calling(facts.graph, ops.gather):
        yield f"that of {facts.name(node)} is left", node


def _lifetimes(facts: Facts) -> Violations:
    try:
        live_ranges = list(facts.step.lifetimes)
    except (OutOfOrder, UnfinishedLifetime) as error:
        yield str(error), facts.events[error.number] if isinstance(error, OutOfOrder) else facts.output
        return
    for live_range in live_ranges:
        if live_range.number and not facts.context.comes_anew(facts.context.keys[live_range.tile].token):
            yield f"{facts.name(live_range.tile)} is fetched once more", facts.events[live_range.fetch.number]


def _schedule(facts: Facts) -> Violations:
    """The rules that hold of any schedule."""
    for rule, what, at in violations(facts.step):
        yield f"{what} ({rule.text})", facts.output if at is None else facts.events[at.number]


def _reads(facts: Facts) -> Violations:
    for live_range in facts.step.lifetimes:
        wait, release = (facts.events[live_range.steps[kind].number] for kind in ("wait", "release"))
        for reader in readers_of(wait):
            if reader > release and reader is not facts.output:  # nodes compare by position
                yield f"{facts.name(wait)} has been released", reader


def _escapes(facts: Facts) -> Violations:
    for wait in nodes_calling(facts.graph, ops.wait):
        for alias in aliases_of(wait):
            for user in alias.users:
                if user is facts.output or user.target in (ops.reduce_scatter, ops.together):
                    yield f"this one may be memory of {facts.name(wait)}", alias


def _offloads(facts: Facts) -> Violations:
    due: set[int] = set()
    for position, token in facts.context.gradients.items():
        if position in facts.gradients:
            yield f"that of '{facts.context.tiles[token].name}' is still an output", facts.output
        due |= {facts.context.numbers[key] for key in facts.context.tiles_of(token)}
    for gradient in facts.step.lifetimes.gradient_offloads:
        due.discard(gradient.tile)
        if gradient.offloaded is None:
            yield f"that of {facts.name(gradient.tile)} is not offloaded", facts.events[gradient.reduced.number]
    for tile in sorted(due):
        yield f"that of {facts.name(tile)} is not reduce-scattered", facts.output
    for node in nodes_calling(facts.graph, ops.offload):
        shard = operand(node, 1)
        if shard.target is not ops.reduce_scatter or key_of(shard) != key_of(node):
            yield f"what is offloaded for {facts.name(node)} is not its reduce-scattered gradient", node


def _budget(facts: Facts) -> Violations:
    ledger = Ledger(spans(facts.graph, facts.context), operators_in(facts.graph), facts.context.budget)
    operator = ledger.over_budget()
    if operator is not None:
        where = f"operator {operator}" if operator != PROLOGUE else "the prologue"
        held = ", ".join(map(str, ledger.largest(operator)))
        inside = (node for node in facts.graph.nodes if operator_of(node) == operator and node.op == "call_function")
        yield f"{where} has {ledger.at(operator)} of {ledger.budget} bytes ({held})", next(inside, facts.output)


def _boundary(facts: Facts) -> Violations:
    due = [(ops.KINDS[transfer.op], transfer.tile) for transfer in facts.context.successor_prologue]
    started = {
        (kind, tile): facts.events[at.number]
        for tile, ahead in facts.step.lifetimes.unclaimed.items()
        for kind, at in ahead.items()
    }
    for transfer, node in started.items():
        if transfer not in due:
            yield f"it has no need of one more for {facts.name(node)}", node
    if facts.context.budget is None and operators_in(facts.graph):
        for kind, tile in due:
            if (kind, tile) not in started:
                yield f"there is no {kind} of {facts.name(tile)}", facts.output


_LIFETIME = (
    "a tile's live range is one fetch, upload, all-gather, wait and release, and a gradient's way out one "
    "reduce-scatter and offload, in this order"
)

RULES = (
    GraphRule("the placeholders are those of the captured graph", None, _placeholders),
    GraphRule("only transfers use a tile's token", None, _tokens),
    GraphRule("operators are numbered in order, none is left out", "operators", _operators),
    GraphRule("each gradient of a tile is reduce-scattered", "gradients_reduced", _reductions),
    GraphRule("each gradient of a tile is reduce-scattered once", "gradients_reduced", _one_reduction),
    GraphRule("every gather is lowered", "lowered", _no_gathers),
    GraphRule(_LIFETIME, "lowered", _lifetimes),
    GraphRule("a schedule is as plan.spec says", "lowered", _schedule),
    GraphRule("nothing reads a tile after its release", "lowered", _reads),
    GraphRule("results and gradients share no memory with a tile", "lowered", _escapes),
    GraphRule("each gradient of a tile is reduce-scattered once, and offloaded once", "gradients_offloaded", _offloads),
    GraphRule("bytes in flight stay within the budget", "prefetched", _budget),
    GraphRule("forward starts what backward needs in its prologue", "prefetched", _boundary),
)
