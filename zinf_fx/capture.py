"""Dynamo's graph -> AOTAutograd -> planned programs. All planning happens in `partition_fn`, the one place that holds
forward and backward together before either runs; the compilers only bind what was planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.errors import PlanError
from zinf_fx.passes.framework import GraphContext, nodes_calling
from zinf_fx.passes.pipeline import plan_inference, plan_training, schedule_of
from zinf_fx.plan.schedule import GraphSchedule, Plan, Tile
from zinf_fx.runtime.executor import Program, bind_parameters
from zinf_fx.runtime.stored_tensor import StoredTensor


class Capture:
    """One graph of Dynamo's on its way to programs."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], config: Config) -> None:
        self.config = config
        self.plan: Plan | None = None
        self._module = module
        self._inputs = list(inputs)
        self._names = _input_names(module)
        self._contexts: dict[str, GraphContext] = {}

    def compile(self) -> Callable[..., Any]:
        """Plan the graph; the result is called with the values of the graph's inputs."""
        compiled = aot_module_simplified(
            self._module,
            self._inputs,
            fw_compiler=lambda module, inputs: self._bind(module, "forward"),
            bw_compiler=lambda module, inputs: self._bind(module, "backward"),
            inference_compiler=self._inference,
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
        )

        def call(*arguments: Any) -> Any:
            bind_parameters(arguments)
            return compiled(*arguments)

        return call

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **arguments: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        primals = [n for n in joint.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
        tiles = self._tiles(joint.graph, primals)
        outputs = next(iter(joint.graph.find_nodes(op="output"))).args[0]
        gradients = outputs[arguments["num_fwd_outputs"] :]
        positions = {
            position: node.name
            for position, node in enumerate(primals)
            if node.name in tiles and tiles[node.name].gradient_tier and position < len(gradients)
        }
        for position, name in positions.items():
            value = gradients[position].meta.get("val") if gradients[position] is not None else None
            if value is not None and tuple(value.shape) != tiles[name].shape:
                raise PlanError(
                    f"gradient {position} has shape {tuple(value.shape)}, and '{tiles[name].name}' has "
                    f"{tiles[name].shape}: the captured graph orders its gradients in a way that is not known"
                )
        context = GraphContext("joint", self.config, tiles, positions, len(gradients))
        forward, forward_context, backward, backward_context = plan_training(joint, joint_inputs, context, **arguments)
        self._contexts = {"forward": forward_context, "backward": backward_context}
        self._set_plan(schedule_of(forward.graph, forward_context), schedule_of(backward.graph, backward_context))
        return forward, backward

    def _inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        tiles = self._tiles(module.graph, list(module.graph.find_nodes(op="placeholder")))
        self._contexts = {"inference": GraphContext("inference", self.config, tiles)}
        plan_inference(module, self._contexts["inference"])
        self._set_plan(schedule_of(module.graph, self._contexts["inference"]))
        return self._bind(module, "inference")

    def _set_plan(self, *graphs: GraphSchedule) -> None:
        self.plan = Plan(graphs, self.config)

    def _bind(self, module: fx.GraphModule, kind: str) -> Callable[[list], Any]:
        context = self._contexts[kind]
        used = {node.args[0].name for node in nodes_calling(module.graph, *ops.LOWERED)}
        program = Program(module, self.plan.graph(kind), [token for token in context.tiles if token in used])

        # A caller that compiles its whole training step must not trace into the runtime.
        run = torch.compiler.disable(lambda arguments: program(arguments))
        run._boxed_call = True  # AOTAutograd then passes a list that the program may empty
        return run

    def _tiles(self, graph: fx.Graph, placeholders: list[fx.Node]) -> dict[str, Tile]:
        """The tiles of a graph by the name of their token's placeholder.

        AOTAutograd replaces each stored tensor among the inputs by its token, in place.
        """
        gathered: dict[str, fx.Node] = {}
        for node in nodes_calling(graph, ops.gather):
            gathered.setdefault(node.args[0].name, node)
        position_of = {node.name: position for position, node in enumerate(placeholders)}
        tiles: dict[str, Tile] = {}
        for token, gather in sorted(gathered.items(), key=lambda item: position_of.get(item[0], -1)):
            position = position_of.get(token)
            tensor = self._inputs[position] if position is not None and position < len(self._inputs) else None
            shape = tuple(gather.args[1])
            if not isinstance(tensor, StoredTensor) or tuple(tensor.base.shape) != shape:
                raise PlanError(
                    f"'{token}' is gathered with shape {shape}, but input {position} of the captured graph is "
                    f"{tensor if isinstance(tensor, StoredTensor) else type(tensor).__name__}"
                )
            base = tensor.base
            is_parameter = tensor.is_leaf and tensor.requires_grad and not tensor.views
            tiles[token] = Tile(
                index=len(tiles),
                name=self._names[position],
                shape=shape,
                dtype=base.dtype,
                tier=base.tier,
                gradient_tier=base.config.placement.gradients if is_parameter else None,
            )
        return tiles


def _input_names(module: fx.GraphModule) -> list[str]:
    """The qualified name of each input, as `named_parameters()` would give it."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = source.name if source is not None else node.name
        names.append(_qualified(name() if callable(name) else name))
    return names


def _qualified(source: str) -> str:
    """`L['self']._modules['a']._modules['0']._parameters['weight']` -> `a.0.weight`; anything else stays."""
    parts = []
    for piece in source.replace("]", "").replace("'", "").split("["):
        parts.append(piece)
    if len(parts) < 3 or parts[0] != "L":
        return source
    keys = [key.split("._")[0] if "._" in key else key for key in parts[2:]]
    return ".".join(keys)
