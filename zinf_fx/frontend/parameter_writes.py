"""Parameters that forward writes to: refused where the write would be lost, with their names and lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.tensor.view_writes import is_written, watching


@contextmanager
def refusing_lost_writes(module: fx.GraphModule, names: Sequence[str], stored: Sequence[bool]) -> Iterator[None]:
    """Around the capture of Dynamo's graph `module`, whose inputs have `names`; `stored` says which are stored tensors.

    Raises: StoredTensorError when the graph writes to a view of a stored tensor: the value would be lost.
    """
    with watching() as watched:
        yield
    if is_written(watched):
        places = "; ".join(_writes(module, names, stored)) or "no line is known"
        raise StoredTensorError(
            f"the compiled graph writes to a view of a stored parameter ({places}), and the write would be lost: write "
            "to it outside of the compiled region, in a function under torch.compiler.disable"
        )


def _writes(module: fx.GraphModule, names: Sequence[str], stored: Sequence[bool]) -> list[str]:
    """Where operations that write in place take what comes from a stored parameter: its name, and the line."""
    sources: dict[fx.Node, str] = {}
    found: list[str] = []
    inputs = iter(zip(names, stored, strict=True))
    for node in module.graph.nodes:
        if node.op == "placeholder":
            name, is_stored = next(inputs)
            if is_stored:
                sources[node] = name
            continue
        source = next((sources[one] for one in node.all_input_nodes if one in sources), None)
        if source is None or node.op == "output":
            continue
        if _is_in_place(node):
            found.append(f"'{source}': {_line(node)}")
        if isinstance(node.meta.get("example_value"), torch.Tensor):
            sources[node] = source
    return list(dict.fromkeys(found))


def _is_in_place(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name == "setitem" or (name.endswith("_") and not name.endswith("__"))


def _line(node: fx.Node) -> str:
    """The user's line that a node of Dynamo's is from."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    files = [number for number, line in enumerate(lines) if line.startswith("File ")]
    return ": ".join(lines[files[-1] : files[-1] + 2]) if files else node.format_node()
