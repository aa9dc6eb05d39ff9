"""Where autograd is to accumulate gradients, asked of the node of its graph that runs.

So nothing has to remember a parameter: Module.to() refuses to give a tensor another implementation while anybody holds
the tensor weakly.
"""

from __future__ import annotations

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

AccumulateGrad = torch._C._functions.AccumulateGrad


Leaf = tuple[StoredTensor, AccumulateGrad]
"""A stored parameter as an input of a compiled graph, and the node that accumulates its gradient."""


def accumulates(leaf: Leaf) -> bool:
    """Whether the backward pass under way is to add to the parameter's `.grad`: `backward(inputs=...)` is for some
    tensors only.

    Raises: StoredTensorError when `torch.autograd.grad` is to return the gradient.
    """
    parameter, node = leaf
    if not parameter.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        raise StoredTensorError(
            "torch.autograd.grad can't return the gradient of a stored parameter of shape "
            f"{tuple(parameter.shape)} from compiled code: call backward() and read `.grad`, or run the model "
            "uncompiled"
        ) from error


def leaves_of_node() -> dict[int, Leaf]:
    """The stored parameters that the gradients of the node that runs go to, by the ids of their tokens.

    Raises: StoredTensorError when autograd runs no node.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        raise StoredTensorError("a backward graph was called outside of a backward pass: call backward() on the loss")
    leaves: dict[int, Leaf] = {}
    for follower, _ in node.next_functions:
        if isinstance(follower, AccumulateGrad):
            parameter = follower.variable
            if isinstance(parameter, StoredTensor) and not parameter.views:
                leaves[id(parameter.token)] = parameter, follower
    return leaves


def accumulated_leaf() -> torch.Tensor | None:
    """The leaf to whose gradient autograd adds now; None when it does something else."""
    node = torch._C._current_autograd_node()
    return node.variable if isinstance(node, AccumulateGrad) else None
