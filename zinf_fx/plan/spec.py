"""The specification of a schedule: what holds of the events of a step, whoever made them.

It is checked of each graph after every scheduling pass, of a plan when it is finished, and of a plan file when it is
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from zinf_fx.errors import PlanError
from zinf_fx.plan.lifetimes import TRANSFERS, At, Lifetimes
from zinf_fx.plan.schedule import PROLOGUE, Event, GraphSchedule

# What breaks a rule, and at which event; None: something is missing.
Violations = Iterator[tuple[str, At | None]]

# The events that take buffers, and so have an offset.
_WITH_OFFSET = ("fetch", "upload", "offload", "offload_activation", "write")


@dataclass(frozen=True)
class StepGraphs:
    """The graphs of a step, or the only one of them that is known yet."""

    graphs: tuple[GraphSchedule, ...]
    is_whole: bool

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """What the events mean. Raises: OutOfOrder, UnfinishedLifetime."""
        return Lifetimes(self.graphs)

    def name(self, index: int) -> str:
        """A tile's name in errors."""
        return f"'{self.graphs[0].tiles[index].label[:60]}'"

    def events(self) -> Iterator[tuple[At, GraphSchedule, Event]]:
        """Iterate over all events, each with where it stands and its graph."""
        for number, graph in enumerate(self.graphs):
            for position, event in enumerate(graph.events):
                yield At(number, position, event.operator), graph, event


@dataclass(frozen=True)
class Rule:
    """One invariant of events."""

    text: str
    check: Callable[[StepGraphs], Violations]


def check_schedule(graphs: Sequence[GraphSchedule]) -> None:
    """Check the graphs of a whole step. Raises: PlanError naming the rule, the graph and the event."""
    step = StepGraphs(tuple(graphs), True)
    for rule, what, at in violations(step):
        place = "" if at is None else f"{graphs[at.graph].kind} graph: "
        raise PlanError(f"{place}{rule.text}, but {what}")


def violations(step: StepGraphs) -> Iterator[tuple[Rule, str, At | None]]:
    """What breaks the rules, in their order.

    Raises: OutOfOrder and UnfinishedLifetime, where events don't make lifetimes.
    """
    for rule in RULES:
        for what, at in rule.check(step):
            yield rule, what, at


def _tables(step: StepGraphs) -> Violations:
    first = step.graphs[0].tiles
    for graph in step.graphs[1:]:
        if len(graph.tiles) != len(first):
            yield f"the {graph.kind} graph has {len(graph.tiles)}, and the first {len(first)}", None
        for number, (tile, theirs) in enumerate(zip(first, graph.tiles, strict=False)):
            if tile != theirs:
                yield f"tiles[{number}] of the {graph.kind} graph is another than that of the first", None


def _operators(step: StepGraphs) -> Violations:
    last = dict.fromkeys(range(len(step.graphs)), PROLOGUE)
    for at, graph, event in step.events():
        before, count = last[at.graph], max(len(graph.operators), 1)
        if not before <= event.operator < count:
            place = f"events[{at.number}] ({event.kind}) is in operator {event.operator}"
            yield f"{place}, after {before} and of {count}", at
        last[at.graph] = event.operator


def _marks(step: StepGraphs) -> Violations:
    for at, graph, event in step.events():
        where = f"events[{at.number}] ({event.kind}) of {step.name(event.tile)}"
        if event.for_backward and (graph.kind != "forward" or event.kind not in TRANSFERS):
            yield f"{where} is marked as one for backward", at
        if event.resident and event.kind not in (*TRANSFERS, "release"):
            yield f"{where} is marked as resident", at
        if event.offset is not None and event.kind not in _WITH_OFFSET:
            yield f"{where} has an offset, and takes no buffer", at
        if event.offset is not None and event.offset < 0:
            yield f"the offset of {where} is {event.offset}, less than 0", at
        if event.kind == "offload_activation" and not (graph.kind == "forward" and graph.tiles[event.tile].activation):
            yield f"{where} is of no activation of a forward graph", at
        if event.kind == "write" and (graph.kind == "backward" or graph.tiles[event.tile].activation):
            yield f"{where} is of no parameter, or in a backward graph", at


def _reductions(step: StepGraphs) -> Violations:
    counts: Counter[int] = Counter()
    for gradient in step.lifetimes.gradient_offloads:
        counts[gradient.tile] += 1
        # Several uses of a parameter in tiles give a gradient of each tile each.
        if counts[gradient.tile] > 1 and step.graphs[0].tiles[gradient.tile].rows is None:
            yield f"that of {step.name(gradient.tile)} comes a second time", gradient.reduced


def _kept(step: StepGraphs) -> Violations:
    for live_range in step.lifetimes:
        events = step.graphs[live_range.graph].events
        marks = [events[live_range.steps[kind].number].resident for kind in TRANSFERS]
        if any(marks) and not all(marks):
            yield f"only some of the transfers of {step.name(live_range.tile)} find it", live_range.fetch
    for tile in step.lifetimes.of_tile:
        for before, after, next_step in step.lifetimes.reuses(tile):
            if (step.is_whole or not next_step) and before.kept != (after.found == "kept"):
                yield f"that of {step.name(tile)} doesn't go with its next fetch", before.release


def _boundary(step: StepGraphs) -> Violations:
    for tile, ahead in step.lifetimes.unclaimed.items() if step.is_whole else ():
        for at in ahead.values():
            yield f"the forward graph fetches {step.name(tile)} for backward, which doesn't use it", at


RULES = (
    Rule("the graphs of a step have the same tiles", _tables),
    Rule("events are in the order of operators", _operators),
    Rule("events are marked as their kind can be", _marks),
    Rule("each gradient of a tile is reduce-scattered once", _reductions),
    Rule("what a release leaves in memory is there at the next fetch", _kept),
    Rule("what forward starts for backward, backward goes on with", _boundary),
)
