"""The inputs of Dynamo's graph: what they are, which of them a node of AOTAutograd's is, and which are tiles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from torch._guards import GuardSource, detect_fake_mode
from torch.distributed.tensor import DTensor

from zinf_fx import ops
from zinf_fx.checkpoint.models import WRAPPED
from zinf_fx.config import Config
from zinf_fx.errors import PlanError, StoredTensorError
from zinf_fx.frontend.parameters import (
    abstract_parameter,
    bytes_in_memory,
    check_storable,
    configs_of,
    is_ordinary,
    placed,
)
from zinf_fx.passes.ir.framework import nodes_calling, operand
from zinf_fx.placement import Placement, PlacementRules
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.sharding import Groups, shards_of
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.local_parameter import local_input
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.views import note_gathered

_LOOKUPS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag, torch.embedding)


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
    return [GraphInput(*parts) for parts in zip(input_names(module), given, taken, seen, local, strict=True)]


class Origin(NamedTuple):
    """Which input of Dynamo's graph a node of AOTAutograd's is, or is the gradient of: its number and, if AOTAutograd
    took a tensor subclass apart, the way from there. AOTAutograd adds inputs of its own and puts them anywhere."""

    number: int
    attributes: tuple[str, ...] = ()


def origin_of(descriptor: AOTInput | AOTOutput | None) -> Origin | None:
    """The origin that AOTAutograd's own description of an input or of a gradient names; None: there is none."""
    if isinstance(descriptor, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
        base = origin_of(descriptor.base)
        return base and Origin(base.number, (*base.attributes, descriptor.attr))
    if isinstance(descriptor, GradAOTOutput):
        return origin_of(descriptor.grad_of)
    return Origin(descriptor.idx) if isinstance(descriptor, PlainAOTInput) else None


def written_behind(graph: fx.Graph) -> set[str]:
    """The names of the inputs of AOTAutograd's graph to which the caller copies results of it."""
    results: Sequence[AOTOutput | None] = graph.output_node().meta["desc"]
    written = [result.mutated_input for result in results if isinstance(result, InputMutationAOTOutput)]
    return {node.name for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in written}


def roles_of(graph: fx.Graph, inputs: Sequence[GraphInput]) -> dict[str, str]:
    """What those inputs of AOTAutograd's graph are, by name, that don't come with the call."""
    origins = {node.name: origin_of(node.meta.get("desc")) for node in graph.find_nodes(op="placeholder")}
    roles = {name: "internal" for name, origin in origins.items() if origin is None}
    return roles | {
        name: "buffer" for name, origin in origins.items() if origin and not inputs[origin.number].comes_with_call
    }


def unmoved_bytes(inputs: Sequence[GraphInput]) -> int:
    """Bytes of the inputs that are the model's own and not stored: buffers, and parameters that stay in memory."""
    own = [given.taken for given in inputs if not given.comes_with_call and not given.is_stored]
    return sum(bytes_in_memory(value) for value in own if isinstance(value, torch.Tensor))


def sharing_memory(inputs: Sequence[GraphInput]) -> list[str]:
    """The names of the ordinary tensors among the inputs that share memory with others."""
    owners = {
        graph_input.name: graph_input.given.untyped_storage()._cdata
        for graph_input in inputs
        if isinstance(graph_input.given, torch.Tensor) and not hasattr(graph_input.given, "__tensor_flatten__")
    }
    often = Counter(owners.values())
    return [name for name, owner in owners.items() if often[owner] > 1]


def input_names(module: fx.GraphModule) -> list[str]:
    """The qualified name of each input, as `named_parameters()` would give it without wrappers of the model's parts."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = source.name if source is not None else node.name
        names.append(_qualified(str(name() if callable(name) else name)))
    return names


def _qualified(source: str) -> str:
    """`L['self']._modules['a']._modules['0']._parameters['weight']` -> `a.0.weight`; anything else stays."""
    source = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", source)  # so where a class has a `__getattr__` of its own
    root, *parts = source.replace("]", "").replace("'", "").split("[")
    if len(parts) < 2 or root != "L":
        return source
    return ".".join(own for key in parts[1:] if (own := key.partition("._")[0]) not in WRAPPED)


def tables_in(module: fx.GraphModule, inputs: Iterable[object]) -> set[int]:
    """The ids of the inputs of Dynamo's graph that it looks up by rows."""
    looked_up = {node.args[1] for node in module.graph.nodes if node.target in _LOOKUPS and len(node.args) > 1}
    placeholders = module.graph.find_nodes(op="placeholder")
    return {id(value) for node, value in zip(placeholders, inputs, strict=True) if node in looked_up}


def abstract_inputs(module: fx.GraphModule, inputs: Sequence[object], config: Config) -> list[object]:
    """The inputs of Dynamo's graph `module`, with ordinary parameters as they would be once they are offloaded.

    Raises: StoredTensorError for one that can't be stored, of which meta tensors are.
    """
    abstract, names, tables = list(inputs), input_names(module), tables_in(module, inputs)
    configs = configs_of(config, {name: value for name, value in zip(names, inputs, strict=True) if is_ordinary(value)})
    for number, (value, name) in enumerate(zip(inputs, names, strict=True)):
        if is_ordinary(value):
            check_storable(value, f"parameter '{name}'")
            abstract[number] = abstract_parameter(value, f"parameter '{name}'", configs[name], tables)
    return abstract


@contextmanager
def taking_local(module: fx.GraphModule, inputs: Sequence[GraphInput]) -> Iterator[None]:
    """A block in which Dynamo's graph takes what it is to take of each input: in the place of an offloaded DTensor
    parameter, this rank's part, of which it makes the DTensor. See [Note: DTensor parameters].

    Backward of that reduces a gradient to the placements of its parameter.

    Raises: StoredTensorError where a hook is to see a gradient that compiled code has no DTensor of.
    """
    made: dict[fx.Node, fx.Node] = {}
    placeholders = module.graph.find_nodes(op="placeholder")
    for placeholder, graph_input in zip(placeholders, inputs, strict=True):
        whole = graph_input.given
        if graph_input.taken is whole:
            continue
        if graph_input.taken.has_gradient_hooks:
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
    mode = detect_fake_mode([graph_input.seen for graph_input in inputs])
    return [
        graph_input.taken
        if mode is None or graph_input.taken is graph_input.seen
        else mode.from_tensor(graph_input.taken, static_shapes=True)
        for graph_input in inputs
    ]


def _maker_of(whole: DTensor) -> Callable[[torch.Tensor], DTensor]:
    mesh, placements, shape, stride = whole.device_mesh, whole.placements, whole.shape, whole.stride()

    def distributed(local: torch.Tensor) -> DTensor:
        made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        note_gathered(made)
        return made

    return distributed


def tiles_of(
    graph: fx.Graph, inputs: Sequence[GraphInput], groups: Groups, placement: Placement | PlacementRules | None
) -> tuple[dict[str, Tile], tuple[str, ...], dict[str, Hashable]]:
    """The tiles of a graph by the name of their token's placeholder; these names in the order in which the parameters
    were made; and by name, how each is treated: see `GraphContext`. `placement`: in the place of their own."""
    gathered = {operand(node).name for node in nodes_calling(graph, ops.gather, ops.write)}
    tiles: dict[str, Tile] = {}
    keys: dict[str, int] = {}
    treatments: dict[str, Hashable] = {}
    numbers: dict[Ranks, int] = {}  # which are the same on every rank
    ranks = groups.shards
    for token in graph.find_nodes(op="placeholder"):
        if token.name not in gathered:
            continue
        origin = origin_of(token.meta["desc"].base)
        assert origin is not None
        tensor = inputs[origin.number].taken
        for attribute in origin.attributes:
            tensor = getattr(tensor, attribute)
        if not isinstance(tensor, StoredTensor):
            raise PlanError(f"'{token}' is gathered, but input {origin} of the captured graph is {tensor!r}")
        base = tensor.base
        keys[token.name] = tensor.stored.key
        # Hooks on a gradient are autograd's to run: such a gradient stays an output.
        moves = tensor.is_leaf and tensor.requires_grad and not tensor.views and not tensor.has_gradient_hooks
        name = inputs[origin.number].name
        if not isinstance(inputs[origin.number].taken, (StoredTensor, DTensor)):  # several tensors make one parameter
            name = ".".join((name, *origin.attributes))
        asked = None if placement is None else placement.of(name, tensor)
        config = placed(base.config, asked)
        known = tensor.stored.stands_for or tensor.stored
        trained_by = numbers.setdefault(known.shard.ranks, len(numbers))
        treatments[token.name] = (_treated(placed(known.config, asked)), trained_by)
        shards = shards_of(base.shape, base.dtype, ranks, config) if ranks > 1 else None
        tiles[token.name] = Tile(
            name=name,
            shape=tuple(base.shape),
            dtype=base.dtype,
            tier=base.tier if asked is None else asked.parameters,
            gradient_tier=config.own_placement.gradients if moves else None,
            state_tier=config.own_placement.optimizer if moves else None,
            state_dtype=(tensor.stored.gradient.state_dtype or known.gradient.state_dtype) if moves else None,
            master_dtype=(tensor.stored.gradient.master_dtype or known.gradient.master_dtype) if moves else None,
            ranks=ranks,
            shard=shards.size if shards else 0,
            partitioned=ranks > 1 and config.stage == 3,
            replicas=groups.replicas,
            segment=shards.segment if shards and len(shards.segments) > 1 else 0,
            owned=shards is not None and shards.owner is not None,  # whichever: a plan is the same for all
        )
    return tiles, tuple(sorted(keys, key=keys.__getitem__)), treatments


def _treated(config: Config) -> Hashable:
    """The options that say what becomes of a parameter's gradients and states, besides what its tile says."""
    return config.stage, config.gradient_reduction, config.reduce_dtype


def gradient_positions(joint: fx.Graph, tiles: Mapping[str, Tile], num_fwd_outputs: int) -> dict[int, str]:
    """Return, by position among a joint graph's gradients, the name of each tile's placeholder, of tiles whose
    gradients have a tier."""
    (output,) = joint.find_nodes(op="output")
    descriptors = output.meta["desc"][num_fwd_outputs:]
    position_of = {origin_of(descriptor): position for position, descriptor in enumerate(descriptors)}
    positions = {}
    for node in joint.find_nodes(op="placeholder"):
        if node.name in tiles and tiles[node.name].gradient_tier:
            position = position_of.get(origin_of(node.meta["desc"].base))
            if position is not None:  # autograd finds no gradient for a weight that is used detached
                positions[position] = node.name
    return positions
