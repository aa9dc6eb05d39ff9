"""A captured graph as text that is the same whenever the same model is captured with inputs of the same types.

Equal layers have equal lines: what a node computes with is named by how many places before it stands, and inputs by
their number. Of inputs that are no parameters, those of the call have their type alone; others say first what they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zinf_fx.errors import PlanError
from zinf_fx.passes.ir.collectives import collectives_of, group_of, is_collective
from zinf_fx.passes.ir.framework import GraphContext
from zinf_fx.passes.ir.printer import target_text, tile_text, type_text
from zinf_fx.plan.plan import Fingerprint

# A size that torch.compile leaves open, as it does when it sees another one.
_SYMBOLIC = re.compile(r": (?:\w+ )?size |\[(?:[^\]]*\D)?s\d+\b")
_ON_SIZES = (
    ". The graph is for any size: torch.compile(..., dynamic=False) makes one for each, and the option 'plan' takes a "
    "list, with a plan for each of them"
)
# Characters of a line that an error shows.
_LONG = 240


def fingerprint_of(graph: fx.Graph, context: GraphContext, roles: Mapping[str, str]) -> Fingerprint:
    """Return the fingerprint of a graph that no pass has changed yet. `roles`: as for `lines_of`."""
    known: dict[str, int] = {}
    nodes = [known.setdefault(line, len(known)) for line in lines_of(graph, context, roles)]
    return Fingerprint(torch.__version__, version("zinf-fx"), tuple(known), tuple(nodes))


def check_same(plan: Fingerprint, captured: Fingerprint) -> None:
    """Check that a plan is for the graph that was found. Raises: PlanError naming the first difference."""
    for name in ("torch", "zinf_fx"):
        made, here = getattr(plan, name), getattr(captured, name)
        if made != here:
            raise PlanError(f"it was made with {name} {made[:60]}, and this is {name} {here}")
    for number in range(max(len(plan.nodes), len(captured.nodes))):
        theirs, ours = (which.text(number) if number < len(which.nodes) else "nothing" for which in (plan, captured))
        if theirs != ours:
            letters = enumerate(zip(theirs, ours, strict=False))
            alike = min(len(theirs), len(ours))
            differing = next(
                (place for place, (their_letter, our_letter) in letters if their_letter != our_letter), alike
            )
            hint = _ON_SIZES if _SYMBOLIC.search(ours) and not _SYMBOLIC.search(theirs) else ""
            theirs, ours = (_around(differing, text) for text in (theirs, ours))
            raise PlanError(f"node {number} of the captured graph is: {ours}; that of the plan: {theirs}{hint}")


def _around(place: int, text: str) -> str:
    """A text, or of a long one what is around a place."""
    if len(text) <= _LONG:
        return text
    start = max(min(place, len(text)) - _LONG // 3, 0)
    part = text[start : start + _LONG]
    return ("..." if start else "") + part + ("..." if start + _LONG < len(text) else "")


def lines_of(graph: fx.Graph, context: GraphContext, roles: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """What each node of a graph that no pass has changed yet is, as text.

    `roles`: a word for each input, by name, that is no parameter and doesn't come with the call, such as "buffer".
    """
    position = {node: number for number, node in enumerate(graph.nodes)}
    # Names of process groups say which ranks they are of, so groups are numbered.
    groups = {group: f"group {n}" for n, group in enumerate(dict.fromkeys(map(group_of, collectives_of(graph))))}
    return [_line(node, position, context, groups, roles) for node in graph.nodes]


def _line(
    node: fx.Node,
    position: Mapping[fx.Node, int],
    context: GraphContext,
    groups: Mapping[Any, str],
    roles: Mapping[str, str],
) -> str:
    if node.op == "placeholder":
        tile, role = context.tiles.get(node.name), roles.get(node.name)
        what = f"parameter '{tile.name}' {tile_text(tile)}" if tile else _values(node.meta.get("val"))
        if role is not None and tile is None:
            what = f"{role} {what}"
        return f"input {position[node]}: {what}"

    group = group_of(node) if is_collective(node) else None

    def text(value: object) -> str:
        if group is not None and value is group:
            return groups[group]
        if isinstance(value, fx.Node):
            return f"input {position[value]}" if value.op == "placeholder" else f"-{position[node] - position[value]}"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key}: {text(entry)}" for key, entry in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return "[" + ", ".join(map(text, value)) + "]"
        plain = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt)
        if value is None or isinstance(value, plain):
            return str(value).removeprefix("torch.")
        return target_text(value) if callable(value) else type(value).__name__

    if node.op == "output":
        return f"return {text(node.args[0])}"
    name = node.target if isinstance(node.target, str) else target_text(node.target)
    arguments = [*map(text, node.args), *(f"{key}={text(value)}" for key, value in node.kwargs.items())]
    return f"{name}({', '.join(arguments)}) -> {_values(node.meta.get('val'))}"


def _values(value: object) -> str:
    """A type, and where it is unless that is a CPU."""
    device = value.device.type if isinstance(value, torch.Tensor) else "cpu"
    return type_text(value) + ("" if device == "cpu" else f" on {device}")
