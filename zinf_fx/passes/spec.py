"""The invariants of a graph between two passes, checked after every pass.

Each rule holds from the pass on that provides what `since` names (None: always).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import fx

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.aliases import aliases_of, readers_of
from zinf_fx.passes.framework import (
    OPERATOR,
    GraphContext,
    Stay,
    TileKey,
    key_of,
    nodes_calling,
    operator_of,
    stays_of,
)
from zinf_fx.passes.gradient_parts import gradient_outputs, parts_of
from zinf_fx.passes.in_flight import Ledger, operators_in, spans
from zinf_fx.passes.printer import print_around
from zinf_fx.plan.schedule import HEAD

Violations = Iterator[tuple[str, fx.Node]]


@dataclass(frozen=True)
class Facts:
    """What the rules look at, found once per check."""

    graph: fx.Graph
    context: GraphContext
    placeholders: tuple[str, ...]

    @cached_property
    def output(self) -> fx.Node:
        return next(iter(self.graph.find_nodes(op="output")))

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        return {node: position for position, node in enumerate(self.graph.nodes)}

    @cached_property
    def steps(self) -> dict[Stay, dict[object, list[fx.Node]]]:
        """By stay of a tile and operation, the nodes that move it for this graph itself.

        A tile that doesn't come anew has one stay, and a parameter that is one tile one gradient.
        """
        found: dict[Stay, dict[object, list[fx.Node]]] = {}
        own = (n for n in nodes_calling(self.graph, *ops.LOWERED) if not n.kwargs.get("turn"))
        for stay, node in stays_of(own):
            several = self.context.divided if node.target in (ops.reduce_scatter, ops.offload) else self._anew
            if stay.key.token not in several:
                stay = Stay(stay.key, 0)
            found.setdefault(stay, {}).setdefault(node.target, []).append(node)
        return found

    @cached_property
    def _anew(self) -> set[str]:
        return {token for token in self.context.tiles if self.context.comes_anew(token)}

    @cached_property
    def stay_of(self) -> dict[fx.Node, Stay]:
        """Whose step a node is."""
        return {node: stay for stay, steps in self.steps.items() for nodes in steps.values() for node in nodes}

    @cached_property
    def turn(self) -> list[fx.Node]:
        """The transfers that the graph starts for its successor."""
        return [node for node in nodes_calling(self.graph, *ops.TRANSFERS) if node.kwargs.get("turn")]

    @cached_property
    def aliases(self) -> dict[fx.Node, list[fx.Node]]:
        """By wait: it, and all that may share its tile's memory."""
        return {wait: aliases_of(wait) for wait in nodes_calling(self.graph, ops.wait)}

    def name(self, node: fx.Node) -> str:
        return f"'{self.context.tile_of(node).label}'"

    @cached_property
    def gradients(self) -> dict[int, fx.Node]:
        """By position, the outputs of backward that are gradients of parameters."""
        return gradient_outputs(self.graph, self.context)


@dataclass(frozen=True)
class Rule:
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
    found = tuple(node.name for node in facts.graph.find_nodes(op="placeholder"))
    if found != facts.placeholders:
        yield f"they are {found} instead of {facts.placeholders}", next(iter(facts.graph.nodes))


def _tokens(facts: Facts) -> Violations:
    for node in facts.graph.find_nodes(op="placeholder"):
        if node.name in facts.context.tiles:
            for user in node.users:
                if user is not facts.output and user.target is not ops.gather and user.target not in ops.LOWERED:
                    yield f"the token of '{facts.context.tiles[node.name].name}' is computed with", user


def _operators(facts: Facts) -> Violations:
    current = HEAD
    for node in facts.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if OPERATOR not in node.meta:
            yield "a node belongs to none", node
        elif operator_of(node) not in (current, current + 1):
            before = f"operator {current}" if current != HEAD else "the head"
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
    for steps in facts.steps.values():
        for node in steps.get(ops.reduce_scatter, [])[1:]:
            yield f"that of {facts.name(node)} is once more", node


def _no_gathers(facts: Facts) -> Violations:
    for node in nodes_calling(facts.graph, ops.gather):
        yield f"that of {facts.name(node)} is left", node


def _journeys(facts: Facts) -> Violations:
    journey = (*ops.TRANSFERS, ops.wait, ops.release)
    for steps in facts.steps.values():
        nodes = [node for step in journey for node in steps.get(step, ())]
        for step in journey if nodes else ():
            if len(steps.get(step, ())) != 1:
                name = step._schema.name.removeprefix("zinf::")
                yield f"{facts.name(nodes[0])} has {len(steps.get(step, ()))} x {name}", nodes[0]
        for one, next_one in pairwise(nodes):
            if facts.order[one] > facts.order[next_one]:
                yield f"one of {facts.name(one)} comes too early", next_one
    for stay, steps in facts.steps.items():
        before = facts.steps.get(Stay(stay.key, stay.number - 1), {})
        for fetch, release in zip(steps.get(ops.fetch, ()), before.get(ops.release, ()), strict=False):
            if facts.order[fetch] < facts.order[release]:
                yield f"{facts.name(fetch)} is still there", fetch


def _reads(facts: Facts) -> Violations:
    for wait in facts.aliases:
        (release,) = facts.steps[facts.stay_of[wait]][ops.release]
        for reader in readers_of(wait):
            if facts.order[reader] > facts.order[release] and reader is not facts.output:
                yield f"{facts.name(wait)} has been released", reader


def _escapes(facts: Facts) -> Violations:
    for wait, aliases in facts.aliases.items():
        for alias in aliases:
            for user in alias.users:
                if user is facts.output or user.target is ops.reduce_scatter:
                    yield f"this one may be memory of {facts.name(wait)}", alias


def _offloads(facts: Facts) -> Violations:
    stays = {stay for stay, steps in facts.steps.items() if ops.reduce_scatter in steps or ops.offload in steps}
    for position, token in facts.context.gradients.items():
        if position in facts.gradients:
            yield f"that of '{facts.context.tiles[token].name}' is still an output", facts.output
        stays |= {Stay(key, 0) for key in facts.context.tiles_of(token)}
    for stay in sorted(stays):
        steps, name = facts.steps.get(stay, {}), facts.context.tile(stay.key).label
        for step in (ops.reduce_scatter, ops.offload):
            if len(steps.get(step, ())) != 1:
                what = step._schema.name.removeprefix("zinf::")
                yield f"'{name}' has {len(steps.get(step, ()))} x {what}", (steps.get(step) or [facts.output])[-1]
    for node in nodes_calling(facts.graph, ops.offload):
        shard = node.args[1]
        if shard.target is not ops.reduce_scatter or key_of(shard) != key_of(node):
            yield f"what is offloaded for {facts.name(node)} is not its reduce-scattered gradient", node


def _budget(facts: Facts) -> Violations:
    ledger = Ledger(spans(facts.graph, facts.context), operators_in(facts.graph), facts.context.budget)
    operator = ledger.over_budget()
    if operator is not None:
        where = f"operator {operator}" if operator != HEAD else "the head"
        held = ", ".join(map(str, ledger.largest(operator)))
        inside = (node for node in facts.graph.nodes if operator_of(node) == operator and node.op == "call_function")
        yield f"{where} has {ledger.at(operator)} of {ledger.budget} bytes ({held})", next(inside, facts.output)


def _resident(facts: Facts) -> Violations:
    for stay, steps in facts.steps.items():
        there = [node for step in ops.TRANSFERS for node in steps.get(step, ()) if node.kwargs.get("resident")]
        if there and len(there) < len(ops.TRANSFERS):
            yield f"only some of the transfers of {facts.name(there[0])} find it", there[0]
        before = facts.steps.get(Stay(stay.key, stay.number - 1), {})
        for release in before.get(ops.release, ()) if ops.fetch in steps else ():
            if bool(release.kwargs.get("resident")) != bool(there):
                yield f"that of {facts.name(release)} doesn't go with its next fetch", release


def _turn(facts: Facts) -> Violations:
    due = [(transfer.op, transfer.key) for transfer in facts.context.successor_head]
    started: set[tuple[object, TileKey]] = set()
    for node in facts.turn:
        key = key_of(node)
        if (node.target, key) not in due or (node.target, key) in started:
            yield f"it has no need of one more for {facts.name(node)}", node
        needed = [op for op, other in due if other == key]
        for op in needed[: needed.index(node.target)]:
            if (op, key) not in started:
                yield f"{facts.name(node)} is not yet on its way", node
        started.add((node.target, key))
    if facts.context.budget is None and operators_in(facts.graph):
        for op, key in due:
            if (op, key) not in started:
                name = op._schema.name.removeprefix("zinf::")
                yield f"there is no {name} of '{facts.context.tile(key).label}'", facts.output


RULES = (
    Rule("the placeholders are those of the captured graph", None, _placeholders),
    Rule("only transfers use a tile's token", None, _tokens),
    Rule("operators are numbered in order, none is left out", "operators", _operators),
    Rule("each gradient of a tile is reduce-scattered", "gradients_reduced", _reductions),
    Rule("each gradient of a tile is reduce-scattered once", "gradients_reduced", _one_reduction),
    Rule("every gather is lowered", "lowered", _no_gathers),
    Rule("a tile's journey is one fetch, upload, all-gather, wait and release, in this order", "lowered", _journeys),
    Rule("nothing reads a tile after its release", "lowered", _reads),
    Rule("results and gradients share no memory with a tile", "lowered", _escapes),
    Rule("each gradient of a tile is reduce-scattered once, and offloaded once", "gradients_offloaded", _offloads),
    Rule("what a release leaves in memory is there at the next fetch", "residency", _resident),
    Rule("bytes in flight stay within the budget", "prefetched", _budget),
    Rule("the turn starts what the next graph needs at its head", "prefetched", _turn),
)
