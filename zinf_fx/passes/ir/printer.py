"""Any graph between capture and executor as text: one line per node, tiles by their parameter's name.

    forward graph
    inputs
      a.weight : f32[4, 4] on nvme
      %0 : f32[2, 4]
    prologue
      fetch a.weight  # lower_gathers
      upload a.weight  # lower_gathers
      allgather a.weight  # lower_gathers
    operator 0
      %1 = wait a.weight : f32[4, 4]  # lower_gathers
      %2 = aten.mm(%0, %1) : f32[2, 4]
      release a.weight  # lower_gathers
    return %2

Values are numbered in graph order, so the text depends on nothing but the graph. After `at` stands the offset of a
transfer's buffer, where it has one, and after `#` the pass that made the node, where one did. In a joint graph
`[must_save]`, `[must_recompute]` is what the partitioner is told.
"""

from __future__ import annotations

import itertools
import operator
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx
from torch.fx.node import Target

from zinf_fx import ops
from zinf_fx.passes.ir.framework import MADE_BY, GraphContext, arguments_of, operand, operator_of
from zinf_fx.plan.schedule import PROLOGUE, Event, Tile

_ZINF_NAMES: dict[Target, str] = {ops.gather: "gather", **ops.KINDS}
_WIDTH = 120


def print_graph(graph: fx.Graph, context: GraphContext) -> str:
    """`graph` as text, ending in a newline. It is not changed, and may be in any state between two passes."""
    lines = [f"{context.kind} graph"]
    section = None
    for node, text in _lines(graph, context):
        if section != (section := _section(node, context)):
            lines.append(section)
        lines.append(text)
    return "\n".join(filter(None, lines)) + "\n"


def print_around(graph: fx.Graph, context: GraphContext, node: fx.Node) -> str:
    """The line of `node`, marked, and two before and after it."""
    at = list(graph.nodes).index(node)
    lines = list(_lines(graph, context))[max(at - 2, 0) : at + 3]
    return "\n".join(f"{'->' if shown is node else '  '}{text}" for shown, text in lines)


def type_text(value: object) -> str:
    """The type of a node's value as text, from the fake value in its metadata."""
    if isinstance(value, torch.Tensor):
        return f"{_dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(type_text, value))})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"size {value}"
    return "none" if value is None else type(value).__name__


def _lines(graph: fx.Graph, context: GraphContext) -> Iterator[tuple[fx.Node, str]]:
    printer = _Printer(context)
    for pack in graph.find_nodes(op="call_function", target=ops.pack):
        printer.name_members(pack)
    for node in graph.nodes:
        if node.op == "placeholder":
            yield node, f"  {printer.input(node)}"
        elif node.op == "output":
            yield node, "\n".join(printer.results(node))
        else:
            yield node, f"  {printer.statement(node)}{printer.remarks(node)}"


def _section(node: fx.Node, context: GraphContext) -> str:
    if node.op in ("placeholder", "output"):
        return "inputs" if node.op == "placeholder" else ""
    if "operators" not in context.provided:
        return "nodes"
    number = operator_of(node)
    return "prologue" if number == PROLOGUE else f"operator {number}"


class _Printer:
    """Numbers the values of one graph as it goes."""

    def __init__(self, context: GraphContext) -> None:
        self._context = context
        self._names: dict[fx.Node, str] = {}
        self._numbers = itertools.count()

    def name_members(self, pack: fx.Node) -> None:
        for token, member in zip(arguments_of(pack)[0], self._context.tiles[pack.name].members, strict=True):
            self._names[token] = member.name

    def input(self, node: fx.Node) -> str:
        tile = self._context.tiles.get(node.name)
        if node in self._names:
            return self._names[node]
        if tile is None:
            return f"{self._number(node)}{self._type(node)}"
        self._names[node] = tile.name
        return f"{tile.name} : {tile_text(tile)}"

    def statement(self, node: fx.Node) -> str:
        name = _ZINF_NAMES.get(node.target)
        if node.target in (ops.gather, ops.wait):
            what = f"{name} {self._tile(node)}"
        elif node.target is ops.offload_activation:
            what = f"{name} {self._value(node.args[0])} as {self._context.tile_of(node).name}"
        elif name is not None:
            what = f"{name} {', '.join((self._tile(node), *map(self._value, node.args[1:])))}"
            if node.target is not ops.reduce_scatter:  # the others have no result
                return what + (_marks(node.meta[ops.EVENT]) if ops.EVENT in node.meta else "")
        elif node.target is ops.pack:
            self._names[node] = name = self._context.tiles[node.name].name
            return f"{name} = pack {', '.join(map(self._value, arguments_of(node)[0]))}"
        elif node.target is ops.member:
            member = self._context.member_of(node)
            what = f"{member.name} in {self._value(node.args[0])}"
        elif node.target is operator.getitem:
            what = f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        elif node.op == "get_attr":
            what = f"constant {node.target}"
        else:
            arguments = [self._value(a) for a in node.args]
            arguments += [f"{name}={self._value(a)}" for name, a in node.kwargs.items()]
            what = f"{target_text(node.target)}({', '.join(arguments)})"
        return f"{self._number(node)} = {what}{self._type(node)}"

    def remarks(self, node: fx.Node) -> str:
        tag = node.meta.get("recompute") if self._context.kind == "joint" else None
        text = f" [{tag.name.lower()}]" if tag is not None else ""
        return text + (f"  # {node.meta[MADE_BY]}" if MADE_BY in node.meta else "")

    def results(self, output: fx.Node) -> list[str]:
        results = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
        texts = [self._value(result) for result in results]
        ours = len(texts) - self._context.backward_outputs if self._context.kind == "joint" else len(texts)
        lines = _wrapped("return", texts[:ours])
        return lines + (_wrapped("return of backward", texts[ours:]) if self._context.kind == "joint" else [])

    def _tile(self, node: fx.Node) -> str:
        token = operand(node)
        return self._context.tile_of(node).label if token.name in self._context.divided else self._value(token)

    def _number(self, node: fx.Node) -> str:
        self._names[node] = name = f"%{next(self._numbers)}"
        return name

    def _type(self, node: fx.Node) -> str:
        return f" : {type_text(node.meta['val'])}" if "val" in node.meta else ""

    def _value(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self._names.get(value, f"<{value.name}, not yet computed>")
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{k}: {self._value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return "[" + ", ".join(map(self._value, value)) + "]"
        if isinstance(value, slice):
            return ":".join("" if v is None else self._value(v) for v in (value.start, value.stop, value.step))
        if isinstance(value, torch._ops.OpOverload):
            return target_text(value)
        return str(value).removeprefix("torch.")


def _marks(event: Event) -> str:
    text = " for backward" if event.for_backward else " resident" if event.resident else ""
    return text if event.offset is None else f"{text} at {event.offset}"


def _dtype_text(dtype: torch.dtype) -> str:
    """`f32`, `bf16`, `i64`, `u8`, `c64`; all others as PyTorch calls them."""
    name = str(dtype).removeprefix("torch.")
    short = re.fullmatch(r"(bf|f|i|u|c)[a-z]+(\d+)", name)
    return short[1] + short[2] if short else name


def tile_text(tile: Tile) -> str:
    """The type of a parameter or activation, and where it and its gradient live, and where its states do, if that is
    elsewhere than it."""
    text = f"{_dtype_text(tile.dtype)}[{', '.join(map(str, tile.shape))}] on {tile.tier}"
    text += f", gradient on {tile.gradient_tier}" if tile.gradient_tier else ""
    text += f", states on {tile.state_tier}" if tile.state_tier not in (None, tile.tier) else ""
    text += f", moments in {tile.state_dtype}" if tile.state_dtype else ""
    return text + (f", master {tile.master_dtype}" if tile.master_dtype else "")


def target_text(target: object) -> str:
    """`aten.mm`; the overload only where it isn't the default one."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def _wrapped(head: str, texts: list[str]) -> list[str]:
    return textwrap.wrap(f"{head} {', '.join(texts)}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
