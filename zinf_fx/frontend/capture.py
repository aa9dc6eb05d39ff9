"""Dynamo's graph -> AOTAutograd -> planned programs. All planning happens in `partition_fn`, the one place that holds
forward and backward together before either runs; the compilers only bind what was planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing

from zinf_fx.config import Config, Placement
from zinf_fx.frontend.agreement import Agreement
from zinf_fx.frontend.equal_values import replicas_of
from zinf_fx.frontend.given_plan import about_given, plan_for
from zinf_fx.frontend.graph_inputs import graph_inputs, origin_of, roles_of, unmoved_bytes
from zinf_fx.frontend.local_inputs import taking_local, traced
from zinf_fx.frontend.parameter_writes import noted_writes, refusing_lost_writes
from zinf_fx.frontend.tiles import gradient_positions, placed, tiles_of
from zinf_fx.machine.rates import measured
from zinf_fx.passes.activations.replication import mark_equal
from zinf_fx.passes.following import follow_inference, follow_training
from zinf_fx.passes.ir.fingerprint import fingerprint_of
from zinf_fx.passes.ir.framework import GraphContext, is_compute, operator_of
from zinf_fx.passes.ir.rewriting import copied
from zinf_fx.passes.pipeline import plan_inference, plan_of, plan_training
from zinf_fx.plan.memory.use import most
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import NOMINAL, Rates
from zinf_fx.plan.schedule import GraphKind
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.execute.executor import EXECUTOR, Program
from zinf_fx.runtime.tensor.local_parameter import local_input
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


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
        self._plans = plans
        self.plan: Plan | None = None
        self.graphs: dict[GraphKind, fx.Graph] = {}
        self._module = module
        given = list(inputs)
        self._inputs = graph_inputs(module, given, given if seen is None else seen)
        self._together = Agreement(config, groups, self._inputs)
        self._contexts: dict[str, GraphContext] = {}
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
        self._together.check_together(self._inputs)
        if self._rates is None:  # while values can be computed
            self._rates = self._together.rates_of_first(self._inputs, self._measured())
        given, taken = [one.given for one in self._inputs], [one.taken for one in self._inputs]
        for tensor in taken:
            if isinstance(tensor, StoredTensor):
                tensor.storage.agree()
        stored = [isinstance(tensor, StoredTensor) for tensor in taken]
        with (
            taking_local(self._module, given),
            refusing_lost_writes(self._module, [one.name for one in self._inputs], stored),
        ):
            compiled = aot_module_simplified(
                self._module,
                traced([one.seen for one in self._inputs], taken),
                fw_compiler=lambda module, inputs: self._bind(module, "forward"),
                bw_compiler=lambda module, inputs: self._bind(module, "backward"),
                inference_compiler=self._inference,
                partition_fn=self._partition,
                keep_inference_input_mutations=True,
            )
        self._together.compare(self.plan)
        self._inputs = []  # all is planned by now, and the model may die before its compiled code

        reserved = False

        def call(*arguments: Any) -> Any:
            nonlocal reserved
            arguments = [local_input(argument) for argument in arguments]
            if not reserved:
                self._reserve(arguments)
                reserved = True
            self._together.check_first(arguments)
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
        written = noted_writes(joint.graph, self._together.groups)
        tiles = tiles_of(joint.graph, self._inputs, self._together.groups, placement)
        (output,) = joint.graph.find_nodes(op="output")
        context = GraphContext(
            "joint",
            placed(self.config, placement),
            tiles,
            gradient_positions(joint.graph, tiles, arguments["num_fwd_outputs"]),
            len(output.args[0]) - arguments["num_fwd_outputs"],
            unmoved=unmoved_bytes(self._inputs),
            written=written,
            rates=self._rates or NOMINAL,
        )
        fingerprint = fingerprint_of(joint.graph, context, roles_of(joint.graph, self._inputs))
        if (mesh := self._together.mesh) is not None:
            inputs = {node.name: self._given_for(node) for node in joint.graph.find_nodes(op="placeholder")}
            ranks = None if self._together.alone else self._together.tensor_ranks
            mark_equal(joint.graph, context, replicas_of(joint.graph, context, inputs, mesh, ranks))
            context = replace(context, tensor_ranks=mesh.size())
        if self._plans:
            plan = plan_for(self._plans, fingerprint, "forward", self._together.groups)
            with about_given(plan):
                planned = follow_training(joint, joint_inputs, context, plan, **arguments)
        else:
            planned = plan_training(joint, joint_inputs, context, **arguments)
        forward, forward_context, backward, backward_context = planned
        self._contexts = {"forward": forward_context, "backward": backward_context}
        self.graphs = {"forward": forward.graph, "backward": backward.graph}
        plan = plan_of([(forward.graph, forward_context), (backward.graph, backward_context)])
        self._together.note_collectives(forward.graph, forward_context)
        self._together.note_collectives(backward.graph, backward_context)
        self.plan = replace(plan, fingerprint=fingerprint)
        return forward, backward

    def _given_for(self, placeholder: fx.Node) -> object:
        """What the caller gives, of which AOTAutograd's input is a part; None: nothing."""
        origin = origin_of(placeholder.meta["desc"])
        return None if origin is None else self._inputs[origin.index].given

    def _measured(self) -> Rates:
        """Of this machine, where a choice depends on them; nominal ones where there is no store to measure."""
        config = self.config
        if self._plans:
            return NOMINAL
        stored = next((one.taken for one in self._inputs if isinstance(one.taken, StoredTensor)), None)
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
        written = noted_writes(module.graph, self._together.groups)
        tiles = tiles_of(module.graph, self._inputs, self._together.groups, placement)
        unmoved = unmoved_bytes(self._inputs)
        context = GraphContext("inference", placed(self.config, placement), tiles, unmoved=unmoved, written=written)
        fingerprint = fingerprint_of(module.graph, context, roles_of(module.graph, self._inputs))
        if self._plans:
            plan = plan_for(self._plans, fingerprint, "inference", self._together.groups)
            with about_given(plan):
                context = follow_inference(module, context, plan)
        else:
            context = plan_inference(module, context)
        self._contexts = {"inference": context}
        self.graphs = {"inference": module.graph}
        self._together.note_collectives(module.graph, context)
        self.plan = replace(plan_of([(module.graph, context)]), fingerprint=fingerprint)

    def _reserve(self, arguments: Sequence[Any]) -> None:
        """Set apart what the plan takes of the memories that the stored parameters among `arguments` share.

        At the first call, and not while Dynamo compiles for one thread at a time: a thread that waits for `RUNNING`
        then may be waited for by the thread that has it.
        """
        plan = self.plan
        if plan is None:
            return
        storages = [tensor.storage for tensor in arguments if isinstance(tensor, StoredTensor)]
        with RUNNING.turn():
            for tiers in {storage.tiers for storage in storages} - {None}:
                devices = {s.device for s in storages if s.tiers is tiers and not s.device.in_host_memory}
                EXECUTOR.staging.drop_staying()  # what stays would keep regions that are about to be replaced
                tiers.plan(plan.regions, most(plan), devices)

    def _bind(self, module: fx.GraphModule, kind: GraphKind) -> Callable[[list], Any]:
        context = self._contexts[kind]
        tokens = [key.token for key in context.keys]
        operators = {node.name: operator_of(node) for node in module.graph.nodes if is_compute(node)}
        program = Program(module, self.plan, kind, tokens, operators, self._together.tensor_ranks)

        # A caller that compiles its whole training step must not trace into the runtime.
        run = torch.compiler.disable(lambda arguments: program(arguments))
        run._boxed_call = True  # AOTAutograd then passes a list that the program may empty
        return run


class _Captured(Exception):
    """Ends a capture of which only plans are wanted."""
