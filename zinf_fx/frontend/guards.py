"""Which of Dynamo's guards on stored tensors each call has to check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import AttrSource, SubclassAttrListSource
from torch._guards import Guard, GuardsSet, TracingContext

from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


def drop_implied_guards(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Drop the guards on what stored tensors among the inputs of Dynamo's graph `module` are made of. Every tensor of
    this type has a token, which is one number on the CPU, and guards on the type, and on the metadata, are left.

    In a backend, before it returns: then Dynamo makes its checks of the guards that there are.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    stored = {
        node._dynamo_source for node, one in zip(placeholders, inputs, strict=True) if isinstance(one, StoredTensor)
    }
    context = TracingContext.get().guards_context

    def is_implied(guard: Guard) -> bool:
        source = guard.originating_source
        is_token = isinstance(source, AttrSource) and source.member == "token"
        return (is_token or isinstance(source, SubclassAttrListSource)) and source.base in stored

    if stored:
        guards = context.dynamo_guards
        context.dynamo_guards = GuardsSet(type(guards.inner)(one for one in guards if not is_implied(one)))


def hold_shapes(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Have Dynamo make another graph of `module` for stored tensors of other shapes, as it does for parameters in
    memory: a plan moves so many bytes. In a backend, before it returns."""
    for node, one in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        seen = node.meta.get("example_value")
        if isinstance(one, StoredTensor) and isinstance(seen, torch.Tensor):
            for size in seen.shape:
                int(size)  # which makes a guard of one that is variable
