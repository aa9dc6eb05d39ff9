"""The inputs of Dynamo's graph, and which of them a node of AOTAutograd's is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._guards import GuardSource

from zinf_fx.checkpoint.models import WRAPPED
from zinf_fx.runtime.tensor.local_parameter import local_input
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


@dataclass(frozen=True)
class GraphInput:
    """One input of a captured graph.

    Attributes:
        name: the qualified one, as `named_parameters()` would give it without wrappers.
        given: what the caller gives.
        taken: what the graph takes of that: this rank's part of an offloaded DTensor parameter, else all.
        seen: what Dynamo knows in its place.
        comes_with_call: whether it is an argument of the call, or a part of one, and not found in the model or among
            globals.
    """

    name: str
    given: Any
    taken: Any
    seen: Any
    comes_with_call: bool

    @property
    def is_stored(self) -> bool:
        """Whether the graph takes a stored tensor."""
        return isinstance(self.taken, StoredTensor)


def graph_inputs(module: fx.GraphModule, given: Sequence[Any], seen: Sequence[Any]) -> list[GraphInput]:
    """The inputs of Dynamo's graph `module`, in order."""
    sources = [getattr(node, "_dynamo_source", None) for node in module.graph.find_nodes(op="placeholder")]
    local = [source is None or source.guard_source is GuardSource.LOCAL for source in sources]
    taken = map(local_input, given)
    return [GraphInput(*one) for one in zip(input_names(module), given, taken, seen, local, strict=True)]


class Origin(NamedTuple):
    """Which input of Dynamo's graph a node of AOTAutograd's is, or is the gradient of: its index and, if AOTAutograd
    took a tensor subclass apart, the way from there. AOTAutograd adds inputs of its own and puts them anywhere."""

    index: int
    attributes: tuple[str, ...] = ()


def origin_of(descriptor: AOTInput | AOTOutput | None) -> Origin | None:
    """The origin that AOTAutograd's own description of an input or of a gradient names; None: there is none."""
    if isinstance(descriptor, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
        base = origin_of(descriptor.base)
        return base and Origin(base.index, (*base.attributes, descriptor.attr))
    if isinstance(descriptor, GradAOTOutput):
        return origin_of(descriptor.grad_of)
    return Origin(descriptor.idx) if isinstance(descriptor, PlainAOTInput) else None


def written_behind(graph: fx.Graph) -> set[str]:
    """The names of the inputs of AOTAutograd's graph to which the caller copies results of it."""
    written = [one.mutated_input for one in _descriptors_of(graph) if isinstance(one, InputMutationAOTOutput)]
    return {node.name for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in written}


def _descriptors_of(graph: fx.Graph) -> Sequence[AOTOutput | None]:
    """AOTAutograd's own descriptions of a graph's results."""
    return graph.output_node().meta["desc"]


def roles_of(graph: fx.Graph, inputs: Sequence[GraphInput]) -> dict[str, str]:
    """What those inputs of AOTAutograd's graph are, by name, that don't come with the call."""
    origins = {node.name: origin_of(node.meta.get("desc")) for node in graph.find_nodes(op="placeholder")}
    roles = {name: "internal" for name, origin in origins.items() if origin is None}
    return roles | {name: "buffer" for name, one in origins.items() if one and not inputs[one.index].comes_with_call}


def unmoved_bytes(inputs: Sequence[GraphInput]) -> int:
    """Bytes of the inputs that are the model's own and not stored: buffers, and parameters that stay in memory."""
    own = [one.taken for one in inputs if not one.comes_with_call and not one.is_stored]
    return sum(bytes_in_memory(one) for one in own if isinstance(one, torch.Tensor))


def sharing_memory(inputs: Sequence[GraphInput]) -> list[str]:
    """The names of the ordinary tensors among the inputs that share memory with others."""
    owners = {
        one.name: one.given.untyped_storage()._cdata
        for one in inputs
        if isinstance(one.given, torch.Tensor) and not hasattr(one.given, "__tensor_flatten__")
    }
    often = Counter(owners.values())
    return [name for name, owner in owners.items() if often[owner] > 1]


def bytes_in_memory(tensor: torch.Tensor) -> int:
    """Bytes that the elements take: of a wrapper subclass, those of the tensors in it; of what was expanded, once."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        return sum(bytes_in_memory(getattr(tensor, name)) for name in inner)
    if tensor.layout != torch.strided:
        return tensor.nbytes
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def input_names(module: fx.GraphModule) -> list[str]:
    """The qualified name of each input, as `named_parameters()` would give it without wrappers of the model's parts."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = source.name if source is not None else node.name
        names.append(_qualified(name() if callable(name) else name))
    return names


def _qualified(source: str) -> str:
    """`L['self']._modules['a']._modules['0']._parameters['weight']` -> `a.0.weight`; anything else stays."""
    source = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", source)  # so where a class has a `__getattr__` of its own
    root, *parts = source.replace("]", "").replace("'", "").split("[")
    if len(parts) < 2 or root != "L":
        return source
    return ".".join(own for key in parts[1:] if (own := key.partition("._")[0]) not in WRAPPED)
