"""New nodes with the metadata that later stages read, and new graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import fx
from torch._guards import detect_fake_mode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
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


def set_results(graph: fx.Graph, results: Iterable[fx.Node | None]) -> None:
    """Make a graph return something else."""
    output = graph.output_node()
    output.args = (type(output.args[0])(results),)


def repeat_in_backward(node: fx.Node) -> fx.Node:
    """Mark a node that is too cheap to be saved."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    # Of a checkpointed region, the partitioner would take the node for the border, whose value it saves.
    node.meta.pop("ac_graph_id", None)
    return node


def erase_unused(node: fx.Node) -> None:
    """Remove a node that nothing uses any more, and its inputs that nothing else uses."""
    if node.users or node.op != "call_function" or node.is_impure():
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        erase_unused(each)


def copied(graph: fx.Graph) -> fx.Graph:
    """A graph of its own, with nodes that share what their metadata refers to."""
    with warnings.catch_warnings():  # about a class of torch's own that torch 2.13 copies with a graph
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        return copy.deepcopy(graph)


def without_code() -> AbstractContextManager[None]:
    """Within it, graph modules that PyTorch makes get their Python code when they are called. Those that are planned
    are hardly ever, and change often before: to write and compile code each time takes a third of planning."""
    return _use_lazy_graph_module(True)


def copied_module(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own, without code until it is called."""
    with without_code():
        return _make_graph_module(module, copied(module.graph))
