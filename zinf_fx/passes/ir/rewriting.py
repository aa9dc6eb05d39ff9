"""New nodes with the metadata that later stages read, and new graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from torch import fx
from torch._guards import detect_fake_mode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import Argument
from torch.utils.checkpoint import CheckpointPolicy

# What a node inherits from the one that it replaces: all but what describes its own value.
_OWN = ("val", "tensor_meta", "example_value")


def emit(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node at the insertion point, in the place of `like`. Running it on fake values tells the type of its result."""
    node = like.graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta = {key: value for key, value in like.meta.items() if key not in _OWN}
    mode = detect_fake_mode(list(fake_args))
    with nullcontext() if mode is None else mode:
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def emit_again(node: fx.Node, *args: Any) -> fx.Node:
    """What a node computes, at the insertion point, with other arguments."""
    return emit(node, node.target, *args, **node.kwargs)


def set_results(graph: fx.Graph, results: Iterable[Argument]) -> None:
    """Make a graph return something else."""
    output = graph.output_node()
    container: Any = type(output.args[0])  # a list or a tuple
    output.args = (container(results),)


def repeat_in_backward(node: fx.Node) -> fx.Node:
    """Mark a node that is too cheap to be saved."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    # Of a checkpointed region, the partitioner would take the node for the border, whose value it saves.
    node.meta.pop("ac_graph_id", None)
    return node


def erase_unused(node: fx.Node) -> None:
    """Remove a node that nothing uses any more, and its inputs that nothing else uses."""
    pending = [node]
    while pending:
        node = pending.pop()
        if not (node.users or node.op != "call_function" or node.is_impure()):
            inputs = node.all_input_nodes
            node.graph.erase_node(node)
            pending += [source for source in reversed(inputs) if not source.users]


def copied(graph: fx.Graph) -> fx.Graph:
    """A graph of its own, with nodes that share what their metadata refers to."""
    with warnings.catch_warnings():  # about a class of torch's own that torch 2.13 copies with a graph
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        return copy.deepcopy(graph)


def copied_module(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own, as `without_code` makes it."""
    return _LazyGraphModule(module, copied(module.graph))


def without_code(module: fx.GraphModule) -> fx.GraphModule:
    """The module, with Python code that is written when it is called, and not whenever it gets another graph. Most
    modules that are planned are never called: the best of many plans is followed."""
    return _LazyGraphModule.from_graphmodule(module)
