"""A plan as a graph for Graphviz: operators in their order, and each tile's way from its fetch to its use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE, GraphSchedule
from zinf_fx.sizes import in_words


def to_dot(plan: Plan, operators: range | None = None) -> str:
    """One cluster per graph; `operators`: those to draw, default all. Solid arrows are the order of operators, dashed
    ones lead from where a tile's fetch starts to where it is waited for, dotted ones from where a gradient is computed
    to where it leaves."""
    lines = [
        "digraph plan {",
        "  rankdir=LR;",
        "  node [shape=box, fontname=monospace];",
        "  edge [fontname=monospace];",
    ]
    for number, graph in enumerate(plan.graphs):
        lines += [f"  subgraph cluster_{graph.kind} {{", f"    label={_quoted(graph.kind)};"]
        lines += [f"    {line}" for line in _lines(plan, number, operators)]
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _lines(plan: Plan, number: int, operators: range | None) -> Iterator[str]:
    graph = plan.graphs[number]
    shown = [operator for operator in graph.operators if operators is None or operator.index in operators]
    if operators is None or 0 in operators:
        yield f"{_name(graph, PROLOGUE)} [label=prologue, style=rounded];"
    for operator in shown:
        yield f"{_name(graph, operator.index)} [label={_quoted(f'{operator.index}: {operator.label}')}];"
    numbers = [*([PROLOGUE] if operators is None or 0 in operators else []), *(operator.index for operator in shown)]
    for before, after in pairwise(numbers):
        yield f"{_name(graph, before)} -> {_name(graph, after)} [weight=9];"
    there = set(numbers)
    ways: defaultdict[tuple[int, int, str], list[int]] = defaultdict(list)
    for start, end, tile, style in _ways(plan, number):
        if start in there and end in there:
            ways[start, end, style].append(tile)
    for (start, end, style), tiles in ways.items():
        label = "\n".join(f"{graph.tiles[tile].label} {in_words(graph.tiles[tile].nbytes)}" for tile in tiles)
        yield f"{_name(graph, start)} -> {_name(graph, end)} [style={style}, constraint=false, label={_quoted(label)}];"


def _ways(plan: Plan, number: int) -> Iterator[tuple[int, int, int, str]]:
    """The first and last operator of each way, its tile, and how it is drawn, in the order in which ways end."""
    ways = [(s.fetch, s.steps["wait"], s.tile, "dashed") for s in plan.lifetimes if s.graph == number]
    ways += [
        (d.reduced, d.offloaded, d.tile, "dotted") for d in plan.lifetimes.gradient_offloads if d.offloaded is not None
    ]
    for start, end, tile, style in sorted(ways, key=lambda way: way[1]):
        if start.graph == number:
            yield start.operator, end.operator, tile, style


def _name(graph: GraphSchedule, operator: int) -> str:
    return f"{graph.kind}_{'prologue' if operator == PROLOGUE else operator}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
