"""Views of parameters that forward writes to: refused, because the write would be lost, with their names and lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx

from zinf_fx.errors import StoredTensorError
from zinf_fx.frontend.graph_inputs import GraphInput
from zinf_fx.lines import line_of
from zinf_fx.passes.lowering.parameter_writes import note_writes
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.tensor.view_writes import is_written, watching


def noted_writes(graph: fx.Graph, groups: Groups) -> dict[str, int]:
    """By token, how often a graph writes to a parameter. See [Note: written parameters].

    Raises: StoredTensorError where many ranks have the parameter.
    """
    found: Counter[str] = Counter()
    for write in note_writes(graph):
        token, value = write.args
        if groups.replicas * groups.shards > 1:
            raise StoredTensorError(
                f"the compiled graph writes to a stored parameter ({line_of(value)}) that many ranks train together: "
                "write to it outside of the compiled region, in a function under torch.compiler.disable"
            )
        found[token.name] += 1
    return dict(found)


@contextmanager
def refusing_lost_writes(module: fx.GraphModule, inputs: Sequence[GraphInput]) -> Iterator[None]:
    """Around the capture of Dynamo's graph `module`.

    Raises: StoredTensorError when the graph writes to a view of a stored tensor, or to a DTensor that it makes of one:
    the value would be lost.
    """
    with watching() as watched:
        yield
    if is_written(watched):
        places = "; ".join(_writes(module, inputs)) or "no line is known"
        raise StoredTensorError(
            f"the compiled graph writes to a view of a stored parameter, or to a DTensor ({places}), and the write "
            "would be lost: write to it outside of the compiled region, in a function under torch.compiler.disable"
        )


def _writes(module: fx.GraphModule, inputs: Sequence[GraphInput]) -> list[str]:
    """Where operations that write in place take what comes from a stored parameter: its name, and the line."""
    placeholders = zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
    sources = {node: one.name for node, one in placeholders if one.is_stored}
    found: list[str] = []
    for node in module.graph.nodes:
        source = next((sources[one] for one in node.all_input_nodes if one in sources), None)
        if source is None or node.op == "output":
            continue
        if _is_in_place(node):
            found.append(f"'{source}': {line_of(node)}")
        if isinstance(node.meta.get("example_value"), torch.Tensor):
            sources[node] = source
    return list(dict.fromkeys(found))


def _is_in_place(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name == "setitem" or (name.endswith("_") and not name.endswith("__"))
