"""Dynamo's graph -> AOTAutograd -> planned programs. All planning happens in `partition_fn`, the one place that holds
forward and backward together before either runs; the compilers only bind what was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import GuardSource, TracingContext, tracing

from zinf_fx import ops
from zinf_fx.config import Config, Placement
from zinf_fx.errors import PlanError, RanksError
from zinf_fx.frontend.equal_values import check_equal, mesh_of, replicas_of
from zinf_fx.frontend.local_inputs import taking_local, traced
from zinf_fx.frontend.parameter_writes import refusing_lost_writes
from zinf_fx.machine.rates import measured
from zinf_fx.passes.activations.replication import mark_equal
from zinf_fx.passes.following import follow_inference, follow_training
from zinf_fx.passes.ir.collectives import group_of, is_collective
from zinf_fx.passes.ir.fingerprint import check_same, fingerprint_of
from zinf_fx.passes.ir.framework import GraphContext, is_compute, key_of, nodes_calling, operator_of
from zinf_fx.passes.ir.rewriting import copied
from zinf_fx.passes.pipeline import plan_inference, plan_of, plan_training
from zinf_fx.plan.files.digest import digest, digest_of
from zinf_fx.plan.memory.use import most
from zinf_fx.plan.plan import Fingerprint, Plan
from zinf_fx.plan.rates import NOMINAL, Rates
from zinf_fx.plan.schedule import GraphKind, Tile
from zinf_fx.plan.sharding import Groups, Owners, shards_of
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.execute.executor import EXECUTOR, Program
from zinf_fx.runtime.ranks import ALONE, Ranks
from zinf_fx.runtime.tensor.local_parameter import local_input
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tensor_parallel import of_first, resolved, tensor_ranks


class Capture:
    """One graph of Dynamo's on its way to programs.

    `plans`: from files; one of them must be for this graph, and is followed. Without any, the graph is planned.
    `rates`: what choices are weighed with; default those measured here. `groups`: the ranks to plan for;
    default those that train the model. `seen`: the inputs that Dynamo knows, if `inputs` has others for some.

    Attributes:
        plan: what was made of the graph; None before `compile`.
        graphs: the planned graphs, by kind.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        config: Config,
        plans: Sequence[Plan] = (),
        rates: Rates | None = None,
        groups: Groups | None = None,
        seen: Sequence[Any] | None = None,
    ) -> None:
        self.config = config
        self._alone = groups is not None
        self._together = Ranks.of(config) if groups is None else ALONE
        self._groups = self._together.groups if groups is None else groups
        self._plans = plans
        self.plan: Plan | None = None
        self.graphs: dict[GraphKind, fx.Graph] = {}
        self._module = module
        self._given = list(inputs)
        self._inputs = [local_input(one) for one in inputs]
        self._seen = self._given if seen is None else list(seen)
        self._names = input_names(module)
        self._come_with_call = _come_with_call(module)
        self._contexts: dict[str, GraphContext] = {}
        self._collectives: dict[Any, list[str]] = {}  # of the planned graphs, by group
        self._mesh = mesh_of(config, inputs)
        self._tensor_ranks = ALONE
        if self._mesh is not None and not self._alone:
            self._tensor_ranks = tensor_ranks(config, self._mesh.get_group())
        self._rates = rates
        self._compiles = True
        self._captured: tuple[fx.GraphModule, Callable[[fx.GraphModule, Placement | None], object]] | None = None

    def planned(self) -> Plan | None:
        """The graph's plan, and nothing compiled."""
        self.capture()
        if self._captured is not None:
            module, plan = self._captured
            self._captured = None
            plan(module, None)
        return self.plan

    def planned_with(self, placement: Placement) -> Plan | None:
        """The graph's plan if its parameters lived elsewhere, and nothing compiled. The graph is captured once."""
        self.capture()
        if self._captured is not None:
            module, plan = self._captured
            plan(fx.GraphModule(module, copied(module.graph)), placement)
        return self.plan

    def capture(self) -> None:
        """Get at the graph that is to be planned, and no further."""
        if self._captured is None and self.plan is None:
            self._compiles = False
            with suppress(_Captured):
                self.compile()

    def compile(self) -> Callable[..., Any]:
        """Plan the graph; the result is called with the values of the graph's inputs."""
        self._check_together()
        if self._rates is None:  # while values can be computed
            self._rates = self._measured()
            if self.config.activations == "auto" and not self._alone:
                self._rates = of_first(self.config, self._given, self._rates, "measured rates")
        for tensor in self._inputs:
            if isinstance(tensor, StoredTensor):
                tensor.storage.agree()
        stored = [isinstance(tensor, StoredTensor) for tensor in self._inputs]
        with (
            taking_local(self._module, self._given),
            refusing_lost_writes(self._module, self._names, stored),
        ):
            compiled = aot_module_simplified(
                self._module,
                traced(self._seen, self._inputs),
                fw_compiler=lambda module, inputs: self._bind(module, "forward"),
                bw_compiler=lambda module, inputs: self._bind(module, "backward"),
                inference_compiler=self._inference,
                partition_fn=self._partition,
                keep_inference_input_mutations=True,
            )
        if self.plan is not None and self.plan.world_size > 1:
            self._together.agree(digest(self.plan), "the plan of a graph")
        if not self._alone:
            self._agree_on_collectives()
        self.reserve(self._inputs)  # not in `partition_fn`, where tensors are fake
        # All is planned by now, and the model may die before its compiled code.
        self._given, self._seen, self._inputs = [], [], []
        unchecked = self._mesh is not None and not self._alone

        def call(*arguments: Any) -> Any:
            nonlocal unchecked
            arguments = [local_input(argument) for argument in arguments]
            if unchecked:
                check_equal(self._tensor_ranks, arguments)
                unchecked = False
            for argument in arguments:
                if isinstance(argument, StoredTensor):
                    argument.expect_gradient()
            return compiled(*arguments)

        return call

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **arguments: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._stop_with(joint, lambda module, placement: self._training(module, joint_inputs, arguments, placement))
        return self._training(joint, joint_inputs, arguments)

    def _stop_with(self, module: fx.GraphModule, plan: Callable[[fx.GraphModule, Placement | None], object]) -> None:
        """Keep what was captured where plans are all that is wanted: what AOTAutograd does after that takes as long."""
        if not self._compiles:
            context = TracingContext.get()

            def later(module: fx.GraphModule, placement: Placement | None) -> None:
                with tracing(context), context.fake_mode or nullcontext():
                    plan(module, placement)

            self._captured = (module, later)
            raise _Captured

    def _training(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        arguments: dict[str, Any],
        placement: Placement | None = None,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan forward and backward. `placement`: as if this were that of the parameters."""
        tiles = self._tiles(joint.graph, placement)
        (output,) = joint.graph.find_nodes(op="output")
        descriptors = output.meta["desc"][arguments["num_fwd_outputs"] :]
        position_of = {_origin(descriptor): position for position, descriptor in enumerate(descriptors)}
        positions = {}
        for node in joint.graph.find_nodes(op="placeholder"):
            if node.name in tiles and tiles[node.name].gradient_tier:
                position = position_of.get(_origin(node.meta["desc"].base))
                if position is not None:  # autograd finds no gradient for a weight that is used detached
                    positions[position] = node.name
        gradients = output.args[0][arguments["num_fwd_outputs"] :]
        context = GraphContext(
            "joint",
            self._placed(self.config, placement),
            tiles,
            positions,
            len(gradients),
            rates=self._rates or NOMINAL,
        )
        fingerprint = fingerprint_of(joint.graph, context, self._roles(joint.graph))
        if self._mesh is not None:
            inputs = {node.name: self._given_for(node) for node in joint.graph.find_nodes(op="placeholder")}
            ranks = None if self._alone else self._tensor_ranks
            mark_equal(joint.graph, context, replicas_of(joint.graph, context, inputs, self._mesh, ranks))
            context = replace(context, tensor_ranks=self._mesh.size())
        if self._plans:
            plan = self._plan_for(fingerprint, "forward")
            with _named(plan):
                planned = follow_training(joint, joint_inputs, context, plan, **arguments)
        else:
            planned = plan_training(joint, joint_inputs, context, **arguments)
        forward, forward_context, backward, backward_context = planned
        self._contexts = {"forward": forward_context, "backward": backward_context}
        self.graphs = {"forward": forward.graph, "backward": backward.graph}
        plan = plan_of([(forward.graph, forward_context), (backward.graph, backward_context)])
        self._note_collectives(forward.graph, forward_context)
        self._note_collectives(backward.graph, backward_context)
        self.plan = replace(plan, fingerprint=fingerprint)
        return forward, backward

    def _given_for(self, placeholder: fx.Node) -> object:
        """What the caller gives, of which AOTAutograd's input is a part; None: nothing."""
        descriptor = placeholder.meta["desc"]
        origin = _origin(descriptor)
        return None if origin is None else self._given[origin.index]

    def _roles(self, graph: fx.Graph) -> dict[str, str]:
        """What those inputs of a graph are, by name, that don't come with the call."""
        origins = {node.name: _origin(node.meta.get("desc")) for node in graph.find_nodes(op="placeholder")}
        roles = {name: "internal" for name, origin in origins.items() if origin is None}
        return roles | {n: "buffer" for n, one in origins.items() if one and not self._come_with_call[one.index]}

    def _note_collectives(self, graph: fx.Graph, context: GraphContext) -> None:
        """Those that ranks of tensor parallelism start in this order."""
        divided = {token for token, tile in context.tiles.items() if tile.activation and tile.partitioned}
        for node in graph.nodes:
            if is_collective(node):
                self._collectives.setdefault(resolved(group_of(node)), []).append(f"{context.kind}: {node.target}")
            elif node.target is ops.allgather and key_of(node).token in divided:
                self._collectives.setdefault(self._mesh.get_group(), []).append(f"{context.kind}: activation")

    def _agree_on_collectives(self) -> None:
        """Compare the model's own collectives, and their order, over the ranks that take part in them: what recomputing
        repeats may have been decided otherwise there."""
        for group, names in self._collectives.items():
            ranks = tensor_ranks(self.config, group)
            ranks.agree(f"{len(names)} of digest {digest_of(names)}", "the collectives in a graph")

    def _plan_for(self, fingerprint: Fingerprint, kind: GraphKind) -> Plan:
        """The plan that is for the captured graph. Raises: PlanError naming the first difference of the first one."""
        of_kind = [plan for plan in self._plans if any(graph.kind == kind for graph in plan.graphs)]
        if not of_kind:
            what = "trained" if kind == "forward" else "called without gradients"
            raise PlanError(
                f"the model is {what}, and no plan given is for that: export one for such a call, and give both"
            )
        differences = []
        for plan in of_kind:
            try:
                with _named(plan):
                    made_for = Groups(plan.replicas, plan.world_size // plan.replicas)
                    if made_for != self._groups:
                        raise PlanError(f"it was made for {made_for}, and here are {self._groups}")
                    check_same(plan.fingerprint, fingerprint)
                return plan
            except PlanError as error:
                differences.append(error)
        raise differences[0]

    def _check_together(self) -> None:
        """Raises: RanksError when other ranks are to run the graph than the parameters were divided over."""
        for tensor in self._inputs:
            if isinstance(tensor, StoredTensor) and tensor.storage.tiers is not None:
                found = tensor.storage.share.ranks.size
                if found != self._together.size:
                    raise RanksError(
                        f"the model was offloaded for {found} rank(s), and {self._together.size} are to run it: "
                        "initialise torch.distributed before offload(), and keep it until training ends"
                    )

    def _measured(self) -> Rates:
        """Of this machine, where a choice depends on them; nominal ones where there is no store to measure."""
        config = self.config
        if self._plans:
            return NOMINAL
        stored = next((tensor for tensor in self._inputs if isinstance(tensor, StoredTensor)), None)
        if config.activations != "auto" or config.device_memory is None or stored is None:
            return NOMINAL
        if config.activation_tier == "nvme" and not all(directory.is_dir() for directory in config.stores):
            return NOMINAL
        return measured(stored.device, stored.dtype, config.activation_tier, config.stores)

    def _inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._stop_with(module, self._evaluation)
        self._evaluation(module)
        return self._bind(module, "inference")

    def _evaluation(self, module: fx.GraphModule, placement: Placement | None = None) -> None:
        """Plan a graph without backward, as `_training`."""
        config = self._placed(self.config, placement)
        context = GraphContext("inference", config, self._tiles(module.graph, placement))
        fingerprint = fingerprint_of(module.graph, context, self._roles(module.graph))
        if self._plans:
            plan = self._plan_for(fingerprint, "inference")
            with _named(plan):
                context = follow_inference(module, context, plan)
        else:
            context = plan_inference(module, context)
        self._contexts = {"inference": context}
        self.graphs = {"inference": module.graph}
        self._note_collectives(module.graph, context)
        self.plan = replace(plan_of([(module.graph, context)]), fingerprint=fingerprint)

    def reserve(self, inputs: Sequence[Any]) -> None:
        """Set apart what the plan takes of the memories that the stored parameters among `inputs` share."""
        plan = self.plan
        if plan is None:
            return
        storages = [tensor.storage for tensor in map(local_input, inputs) if isinstance(tensor, StoredTensor)]
        with RUNNING.turn():
            for tiers in {storage.tiers for storage in storages} - {None}:
                devices = {s.device for s in storages if s.tiers is tiers and not s.device.in_host_memory}
                EXECUTOR.staging.drop_staying()  # what stays would keep regions that are about to be replaced
                tiers.plan(plan.regions, most(plan), devices)

    def _bind(self, module: fx.GraphModule, kind: GraphKind) -> Callable[[list], Any]:
        context = self._contexts[kind]
        tokens = [key.token for key in context.keys]
        operators = {node.name: operator_of(node) for node in module.graph.nodes if is_compute(node)}
        program = Program(module, self.plan, kind, tokens, operators, self._tensor_ranks)

        # A caller that compiles its whole training step must not trace into the runtime.
        run = torch.compiler.disable(lambda arguments: program(arguments))
        run._boxed_call = True  # AOTAutograd then passes a list that the program may empty
        return run

    @staticmethod
    def _placed(config: Config, placement: Placement | None) -> Config:
        return config if placement is None else Config.of(config, {"placement": placement})

    def _tiles(self, graph: fx.Graph, placement: Placement | None) -> dict[str, Tile]:
        """The tiles of a graph by the name of their token's placeholder. `placement`: in the place of their own."""
        gathered = {node.args[0].name for node in nodes_calling(graph, ops.gather)}
        tiles: dict[str, Tile] = {}
        ranks = self._groups.shards
        for token in graph.find_nodes(op="placeholder"):
            if token.name not in gathered:
                continue
            origin = _origin(token.meta["desc"].base)
            tensor = self._inputs[origin.index]
            for attribute in origin.attributes:
                tensor = getattr(tensor, attribute)
            if not isinstance(tensor, StoredTensor):
                raise PlanError(f"'{token}' is gathered, but input {origin} of the captured graph is {tensor!r}")
            base = tensor.base
            # Hooks on a gradient are autograd's to run: such a gradient stays an output.
            moves = tensor.is_leaf and tensor.requires_grad and not tensor.views and not tensor.has_gradient_hooks
            config = self._placed(base.config, placement)
            owner = Owners(config, ranks).next(0)  # whichever: a plan is the same for all
            shards = shards_of(base.shape, base.dtype, ranks, config, owner) if ranks > 1 else None
            tiles[token.name] = Tile(
                index=len(tiles),
                name=self._names[origin.index],
                shape=tuple(base.shape),
                dtype=base.dtype,
                tier=base.tier if placement is None else placement.parameters,
                gradient_tier=config.placement.gradients if moves else None,
                ranks=ranks,
                shard=shards.size if shards else 0,
                partitioned=ranks > 1 and config.placement.stage == 3,
                replicas=self._groups.replicas,
                segment=shards.segment if shards and len(shards.segments) > 1 else 0,
                owned=ranks > 1 and owner is not None,
            )
        return tiles


class _Captured(Exception):
    """Ends a capture of which only plans are wanted."""


@contextmanager
def _named(plan: Plan) -> Iterator[None]:
    """Say of a PlanError inside that it is about a given plan."""
    try:
        yield
    except PlanError as error:
        raise PlanError(
            f"the plan given ({', '.join(graph.kind for graph in plan.graphs)}) is not for this model as it is called: "
            f"{error}. Export a plan for it, or leave the option 'plan' out"
        ) from error


class _Origin(NamedTuple):
    """Which input of Dynamo's graph a node of AOTAutograd's is, or is the gradient of: its index and, if AOTAutograd
    took a tensor subclass apart, the way from there. AOTAutograd adds inputs of its own and puts them anywhere."""

    index: int
    attributes: tuple[str, ...] = ()


def _origin(descriptor: AOTInput | AOTOutput | None) -> _Origin | None:
    """The origin that AOTAutograd's own description of an input or of a gradient names; None: there is none."""
    if isinstance(descriptor, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
        base = _origin(descriptor.base)
        return base and _Origin(base.index, (*base.attributes, descriptor.attr))
    if isinstance(descriptor, GradAOTOutput):
        return _origin(descriptor.grad_of)
    return _Origin(descriptor.idx) if isinstance(descriptor, PlainAOTInput) else None


def input_names(module: fx.GraphModule) -> list[str]:
    """The qualified name of each input, as `named_parameters()` would give it."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = source.name if source is not None else node.name
        names.append(_qualified(name() if callable(name) else name))
    return names


def _come_with_call(module: fx.GraphModule) -> list[bool]:
    """Whether each input is an argument of the call, or a part of one, and not found in the model or among globals."""
    sources = [getattr(node, "_dynamo_source", None) for node in module.graph.find_nodes(op="placeholder")]
    return [source is None or source.guard_source is GuardSource.LOCAL for source in sources]


def _qualified(source: str) -> str:
    """`L['self']._modules['a']._modules['0']._parameters['weight']` -> `a.0.weight`; anything else stays."""
    parts = []
    for piece in source.replace("]", "").replace("'", "").split("["):
        parts.append(piece)
    if len(parts) < 3 or parts[0] != "L":
        return source
    keys = [key.split("._")[0] if "._" in key else key for key in parts[2:]]
    return ".".join(keys)
