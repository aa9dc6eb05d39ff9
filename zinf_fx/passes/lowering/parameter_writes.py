"""Parameters that forward writes to.

[Note: written parameters]
A graph that writes to a parameter is captured as one that computes the new value and then `written`, the token that
stands for it from then on; AOTAutograd ends it with a copy of the last token into its input. `note_writes` puts a
`write` in the place of each, and lets all gathers be of the input, because backward is to gather what forward wrote;
`after` says how many writes come before. In the graph that writes, `PlaceWrites` puts the new value in the place of
what is gathered after a write. The last one leaves for its tier after the last use of the value that the graph began
with. Backward can gather no value but the last.
"""

from __future__ import annotations

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.errors import StoredTensorError
from zinf_fx.lines import line_of
from zinf_fx.passes.ir.framework import GraphContext, Pass, nodes_calling, operand
from zinf_fx.passes.ir.tile_values import tile_values

aten = torch.ops.aten


def note_writes(graph: fx.Graph) -> list[fx.Node]:
    """Put the writes to parameters into a captured graph. Returns them."""
    token_of: dict[fx.Node, fx.Node] = {}  # by what stands for a parameter after a write: its token
    count: dict[fx.Node, int] = {}  # by the same: the writes until then
    writes = []
    for copy in nodes_calling(graph, aten.copy.default):
        before, write = operand(copy), operand(copy, 1)
        if write.target is ops.written:
            token_of[copy], count[copy] = token_of.get(before, before), count.get(before, 0) + 1
            write.target, write.args = ops.write, (token_of[copy], *write.args)
            write.kwargs = {"after": count[copy] - 1}
            write.meta["partitioner_tag"] = "must_be_in_forward"
            writes.append(write)
    for node in nodes_calling(graph, ops.gather, aten.copy_.default):
        if node.target is ops.gather and (copy := operand(node)) in token_of:
            node.replace_input_with(copy, token_of[copy])
            node.kwargs = {**node.kwargs, "after": count[copy]}
        elif node.args[1] in token_of:
            graph.erase_node(node)
    for copy in reversed(token_of):
        graph.erase_node(copy)
    return writes


class PlaceWrites(Pass):
    """Use what a graph writes to a parameter from then on, and let it leave when the value from before is not needed
    any more. See [Note: written parameters]."""

    name = "place_writes"

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        writes = {(operand(write), _after(write)): write for write in nodes_calling(graph, ops.write)}
        for gather in nodes_calling(graph, ops.gather):
            token, after = operand(gather), _after(gather)
            if (token, after - 1) in writes:
                gather.replace_all_uses_with(operand(writes[token, after - 1], 1))
                graph.erase_node(gather)
            elif after != context.written.get(token.name, 0) and context.kind == "backward":
                raise _refusal(gather, context, "in backward, too")
            else:
                gather.kwargs = {name: value for name, value in gather.kwargs.items() if name != "after"}
        for (token, after), write in writes.items():
            if after + 1 < context.written[token.name]:
                graph.erase_node(write)
            else:
                max(operand(write, 1), *_uses(graph, context, token)).append(write)
        return context


def _after(node: fx.Node) -> int:
    after = node.kwargs.get("after", 0)
    assert isinstance(after, int)
    return after


def _uses(graph: fx.Graph, context: GraphContext, token: fx.Node) -> list[fx.Node]:
    """What computes with the value that a parameter has when the graph begins."""
    values: dict[fx.Node, None] = {}
    for value in tile_values(graph):
        if value.args[0] is token or any(source in values for source in value.all_input_nodes):
            values[value] = None
    for value in values:
        if any(user.op == "output" for user in value.users):
            raise _refusal(value, context, "as a result")
    return [user for value in values for user in value.users if user not in values]


def _refusal(value: fx.Node, context: GraphContext, where: str) -> StoredTensorError:
    line = line_of(value)
    while value.target is not ops.gather:
        value = value.all_input_nodes[0]
    return StoredTensorError(
        f"the compiled graph computes with '{context.tile_of(value).name}' before it writes to it, and the value from "
        f"before is needed {where} ({line}): write first, or outside of the compiled region, in a function under "
        "torch.compiler.disable"
    )
