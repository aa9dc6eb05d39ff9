"""Graphs take this rank's part in place of each offloaded DTensor parameter: see [Note: DTensor parameters]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor

from zinf_fx.errors import StoredTensorError
from zinf_fx.frontend.graph_inputs import GraphInput
from zinf_fx.runtime.tensor import view_writes


@contextmanager
def taking_local(module: fx.GraphModule, inputs: Sequence[GraphInput]) -> Iterator[None]:
    """In the block, Dynamo's graph takes what it is to take of each input, and begins by making the DTensors of them.

    Backward of that reduces a gradient to the placements of its parameter.

    Raises: StoredTensorError where a hook is to see a gradient that compiled code has no DTensor of.
    """
    made: dict[fx.Node, fx.Node] = {}
    placeholders = module.graph.find_nodes(op="placeholder")
    for placeholder, one in zip(placeholders, inputs, strict=True):
        whole = one.given
        if one.taken is whole:
            continue
        if one.taken.has_gradient_hooks:
            raise StoredTensorError(
                f"a hook was registered on the gradient of a DTensor parameter of shape {tuple(whole.shape)}, and "
                "would not run in compiled code: remove it, or run the model uncompiled"
            )
        with module.graph.inserting_after(placeholders[-1]):
            made[placeholder] = node = module.graph.call_function(_maker_of(whole), (placeholder,))
        # Dynamo forgets what it captured a graph with, for Module.to() refuses while anybody holds a parameter weakly.
        node.meta = {key: value for key, value in placeholder.meta.items() if key != "grapharg"}
        placeholder.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: user is not node)
    try:
        yield
    finally:
        for placeholder, node in made.items():
            node.replace_all_uses_with(placeholder)
            module.graph.erase_node(node)


def traced(inputs: Sequence[GraphInput]) -> list[Any]:
    """What to trace a graph with. Where Dynamo has seen something else than the graph takes, it would take the sizes of
    what it doesn't know for variable ones."""
    mode = detect_fake_mode([one.seen for one in inputs])
    return [one.taken if one.taken is one.seen else mode.from_tensor(one.taken, static_shapes=True) for one in inputs]


def _maker_of(whole: DTensor) -> Callable[[torch.Tensor], DTensor]:
    mesh, placements, shape, stride = whole.device_mesh, whole.placements, whole.shape, whole.stride()

    def distributed(local: torch.Tensor) -> DTensor:
        made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        view_writes.note_gathered(made)
        return made

    return distributed
