"""Which line of the user's a node of a graph is from."""

from __future__ import annotations

from torch import fx


def line_of(node: fx.Node) -> str:
    """The user's line that a node of Dynamo's or AOTAutograd's is from."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    files = [number for number, line in enumerate(lines) if line.startswith("File ")]
    return ": ".join(lines[files[-1] : files[-1] + 2]) if files else str(node.format_node())
