"""Inputs that a graph writes to: backward computes with the values that forward computed with.

[Note: written inputs]
Running means, codebooks, queues and power iterations are buffers that forward writes to, and the graph's last nodes
copy the new values there; to an input that is differentiated, AOTAutograd copies them after the graph. What backward
computes again it would compute from the buffer as it is then, which the partitioner knows nothing of: it takes an input
for a value. So everything reads a snapshot of such an input, which must be saved if backward needs the value. Where it
is not, forward reads the input itself, as it was captured.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx import ops
from zinf_fx.passes.ir.aliases import memory_node
from zinf_fx.passes.ir.framework import nodes_calling, operand
from zinf_fx.passes.ir.rewriting import emit

_OF_BACKWARD = ("is_backward", "must_be_in_backward")


def snapshot_written_inputs(joint: fx.Graph, written_after: Collection[str]) -> None:
    """Let a joint graph read a snapshot of each input that it writes to, or that is written to after the graph: those
    have their names in `written_after`. What backward itself reads of an input that only backward writes to, stays."""
    placeholders = joint.find_nodes(op="placeholder")
    backward = _nodes_of_backward(joint)
    for value in placeholders:
        writers = _writers_of(value)
        if not writers and value.name not in written_after:
            continue
        theirs = backward if value.name not in written_after and backward.issuperset(writers) else ()
        readers = [user for user in value.users if not (user in writers or user in theirs or user.op == "output")]
        if not readers:
            continue
        with joint.inserting_after(placeholders[-1]):
            snapshot = emit(value, ops.snapshot, value)
        snapshot.meta = {"val": snapshot.meta["val"], "partitioner_tag": "must_be_in_forward"}
        snapshot.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for reader in readers:
            reader.replace_input_with(value, snapshot)


def place_snapshots(forward: fx.Graph, saved: Collection[fx.Node]) -> None:
    """Make copies of the snapshots that are among the memory of what is `saved`, each as late as it can be."""
    memory = set(map(memory_node, saved))
    for snapshot in nodes_calling(forward, ops.snapshot):
        value = operand(snapshot)
        if snapshot in memory:
            snapshot.target = torch.ops.aten.clone.default
            min(*snapshot.users, *_writers_of(value)).prepend(snapshot)
        else:
            snapshot.replace_all_uses_with(value)
            forward.erase_node(snapshot)


def _writers_of(value: fx.Node) -> list[fx.Node]:
    return [user for user in value.users if _is_mutable(user) and user.args[0] is value]


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _nodes_of_backward(joint: fx.Graph) -> set[fx.Node]:
    """What autograd computed, or a function of the user's own computes of gradients, which bears no mark."""
    of_backward: set[fx.Node] = set()
    for node in joint.nodes:
        if node.meta.get("partitioner_tag") in _OF_BACKWARD or not of_backward.isdisjoint(node.all_input_nodes):
            of_backward.add(node)
    return of_backward
