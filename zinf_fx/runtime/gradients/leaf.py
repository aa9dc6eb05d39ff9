"""Where autograd is to accumulate gradients, asked of the node of its graph that runs.

So nothing has to remember a parameter: Module.to() refuses to give a tensor another implementation while anybody holds
the tensor weakly.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

AccumulateGrad = torch._C._functions.AccumulateGrad  # pyright: ignore[reportAttributeAccessIssue]


Leaf = tuple[StoredTensor, AccumulateGrad]
"""A stored parameter as an input of a compiled graph, and the node that accumulates its gradient."""


class Due(Enum):
    """What the backward pass under way is to do with the gradient of a leaf."""

    NOTHING = "`backward(inputs=...)` is for some tensors only"
    ADDED = "it goes to the parameter's `.grad`"
    RETURNED = "torch.autograd.grad() returns it"


def due_to(leaf: Leaf) -> Due:
    """Return what becomes of the gradient of a leaf."""
    parameter, node = leaf
    if not parameter.requires_grad:
        return Due.NOTHING
    try:
        return Due.ADDED if torch._C._will_engine_execute_node(node) else Due.NOTHING
    except RuntimeError:  # of a leaf whose gradient is taken on its way to the node
        return Due.RETURNED


def compiled_nodes(values: Iterable[object]) -> set[torch.autograd.graph.Node]:
    """Return the nodes of compiled graphs that wrote these tensors, or what they are views of: a result, or an
    input."""
    nodes: set[torch.autograd.graph.Node] = set()
    for value in values:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            continue
        base = value._base  # None, where the value is no view
        written = value.grad_fn if base is None else base.grad_fn
        if written is not None and not _is_compiled(written):  # an input that AOTAutograd wrote to copies its result
            nodes.update(node for node, _ in written.next_functions if node is not None and _is_compiled(node))
        elif written is not None:
            nodes.add(written)
    return nodes


def _is_compiled(node: torch.autograd.graph.Node) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


def refuse_second_derivatives(nodes: Iterable[torch.autograd.graph.Node]) -> None:
    """Let a backward pass through these compiled graphs raise StoredTensorError when autograd is to record it: the
    gradients that leave for their tier would have no graph."""
    for node in nodes:
        node.register_prehook(_refuse_recording)


def _refuse_recording(gradients: tuple[torch.Tensor, ...]) -> None:
    if torch.is_grad_enabled():
        raise StoredTensorError(
            "create_graph=True asks for gradients that can be differentiated again, which compiled code has none of: "
            "run the model uncompiled for this loss (stored parameters work there), or leave create_graph out"
        )


def leaves_of_node() -> dict[int, Leaf]:
    """Return the stored parameters that the gradients of the node that runs go to, by the ids of their tokens.

    Raises: StoredTensorError when autograd runs no node.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        raise StoredTensorError("a backward graph was called outside of a backward pass: call backward() on the loss")
    leaves: dict[int, Leaf] = {}
    for follower, _ in node.next_functions:
        if isinstance(follower, AccumulateGrad):
            parameter = follower.variable  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            if isinstance(parameter, StoredTensor) and not parameter.views:
                leaves[id(parameter.token)] = parameter, follower
    return leaves


def accumulated_leaf() -> torch.Tensor | None:
    """Return the leaf to whose gradient autograd adds now; None when it does something else."""
    node = torch._C._current_autograd_node()
    return node.variable if isinstance(node, AccumulateGrad) else None  # pyright: ignore[reportAttributeAccessIssue]
