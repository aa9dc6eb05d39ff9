"""Which nodes share memory with a tile: decided from the operators' schemas, transitively."""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import fx

from zinf_fx.passes.ir.collectives import WAIT, argument_of, is_collective
from zinf_fx.passes.ir.framework import operand

# Return their argument's memory without saying so in their schema.
_UNDECLARED_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the node's result may share. An operator without a schema may share all of them."""
    if node.op != "call_function":
        return [] if node.op in ("placeholder", "get_attr", "output") else list(node.all_input_nodes)
    if node.target is operator.getitem or node.target in _UNDECLARED_VIEWS:
        return [operand(node)]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes)
    if not isinstance(node.target, torch._ops.OpOverload):
        return []  # arithmetic on sizes
    if node.target is WAIT:  # of a collective it is the result that is there now; of anything else, that itself
        return [source for source in node.all_input_nodes if not is_collective(_started(source))]
    shared = []
    for name in _shared_arguments(node.target):
        value = argument_of(node, name)
        shared += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node)]
    return shared


@cache
def _shared_arguments(target: torch._ops.OpOverload) -> tuple[str, ...]:
    """The arguments whose memory results may share, by the operator's schema."""
    schema = target._schema
    returned = [r.alias_info.before_set for r in schema.returns if r.alias_info]
    return tuple(
        argument.name
        for argument in schema.arguments
        if argument.alias_info and any(_overlap(argument.alias_info.before_set, r) for r in returned)
    )


def _overlap(first: set[str], second: set[str]) -> bool:
    """Whether two alias sets of a schema meet; that of a list (`split` returns one) is unknown, and empty."""
    return not first or not second or bool(first & second)


def memory_node(node: fx.Node) -> fx.Node:
    """The node whose memory the node's result is, or may be: itself, unless it is a view.

    A member of a tuple has memory of its own, unless the tuple is one of views.
    """
    while viewed := aliased_inputs(node):
        source = node
        while source.target is operator.getitem:
            source = operand(source)
        if source is not node and not is_view_node(source):
            break
        node = viewed[0]
    return node


def is_view_node(node: fx.Node) -> bool:
    """Whether the node computes nothing: its result is its input's memory, seen in another way."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable and bool(aliased_inputs(node))
    return node.target is operator.getitem


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Every node that looks at the memory of `node`: its aliases, their users, and what waits for collectives among
    these."""
    readers = {reader: None for alias in aliases_of(node) for reader in (alias, *alias.users)}
    for reader in list(readers):
        if is_collective(reader):
            users = [user for user in reader.users if user.target is operator.getitem]
            readers |= dict.fromkeys(wait for started in (reader, *users) for wait in started.users)
    return list(readers)


def _started(node: fx.Node) -> fx.Node:
    """The collective that a result, or a member of its results, is of."""
    return operand(node) if node.target is operator.getitem else node


def aliases_of(node: fx.Node) -> list[fx.Node]:
    """`node` and every later node whose result may share its memory."""
    aliases = {node}
    order = [node]
    for candidate in order:
        for user in candidate.users:
            if user not in aliases and candidate in aliased_inputs(user):
                aliases.add(user)
                order.append(user)
    return order
