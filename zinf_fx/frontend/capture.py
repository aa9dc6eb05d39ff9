"""Dynamo's graph -> AOTAutograd -> planned programs. All planning happens in `partition_fn`, the one place that holds
forward and backward together before either runs; the compilers only bind what was planned."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch.utils._pytree import tree_leaves

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError, StoredTensorError
from zinf_fx.frontend.agreement import Agreement, replicas_of
from zinf_fx.frontend.given_plan import about_given, plan_for
from zinf_fx.frontend.graph_inputs import (
    GraphInput,
    gradient_positions,
    graph_inputs,
    origin_of,
    roles_of,
    sharing_memory,
    taking_local,
    tiles_of,
    traced,
    unmoved_bytes,
    written_behind,
)
from zinf_fx.frontend.micro_batches import hold_sizes, of_one_micro_batch
from zinf_fx.frontend.parameters import placed, placement_of_all
from zinf_fx.lines import line_of
from zinf_fx.machine.rates import measured
from zinf_fx.passes.activations.replication import mark_equal
from zinf_fx.passes.following import follow_inference, follow_training
from zinf_fx.passes.ir.fingerprint import fingerprint_of
from zinf_fx.passes.ir.framework import GraphContext, is_compute, operand, operator_of
from zinf_fx.passes.ir.rewriting import copied, copied_module
from zinf_fx.passes.lowering.compute_regions import FormRegions, Region
from zinf_fx.passes.lowering.offload_gradients import gradients_left_alone
from zinf_fx.passes.lowering.parameter_writes import note_writes
from zinf_fx.passes.lowering.written_inputs import snapshot_written_inputs
from zinf_fx.passes.pipeline import plan_inference, plan_of, plan_training, run_passes
from zinf_fx.plan.memory.use import peak_host_bytes
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import NOMINAL, Rates
from zinf_fx.plan.schedule import GraphKind
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.execute.executor import EXECUTOR, Program
from zinf_fx.runtime.execute.inductor import CompiledRegion, check_can_compile, compiled_region, what_computes
from zinf_fx.runtime.gradients.leaf import compiled_nodes, refuse_second_derivatives
from zinf_fx.runtime.tensor.local_parameter import local_input
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.views import is_written, watching

log = logging.getLogger(__name__)

_Asked = Mapping[str, Any]
"""Options that a graph is planned with, in the place of its own; `placement`: of its stored parameters."""


class Capture:
    """One graph of Dynamo's on its way to programs.

    `plans`: from files; one of them must be for this graph, and is followed. Without any, the graph is planned.
    `rates`: what choices are weighed with; default those measured here. `groups`: the ranks to plan for; default those
    that train the model. `seen`: the inputs that Dynamo knows, if `inputs` has others for some. `division`: the options
    of how the batch is divided, where `config` leaves them to "auto".

    Attributes:
        plan: what was made of the graph; None before `compile`.
        graphs: the planned graphs, by kind.
        holds_sizes: whether what is captured is for the sizes of this call alone.
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
        division: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        devices = {tensor.device for tensor in inputs if isinstance(tensor, torch.Tensor)}
        decided = Config.of(config, division)
        self.config = replace(decided, compute=what_computes(config.compute, devices))
        self._plans = plans
        self.plan: Plan | None = None
        self.graphs: dict[GraphKind, fx.Graph] = {}
        given = list(inputs)
        self._inputs = graph_inputs(module, given, given if seen is None else seen)
        self._standing_in = frozenset(
            graph_input.name for graph_input in self._inputs if graph_input.taken is not graph_input.given
        )  # for DTensors
        # A plan that is given is for the sizes of one call, too.
        divides = replace(config, micro_batches="auto") if plans else config
        self._module, self._inputs = of_one_micro_batch(module, self._inputs, divides, decided.micro_batch_count)
        self.holds_sizes = self._module is not module
        self._together = Agreement(self.config, groups, self._inputs)
        self._contexts: dict[GraphKind, GraphContext] = {}
        self._gradients: Mapping[int, str] = {}  # of backward, by position: the token of each parameter
        self._rates = rates
        self._compiles = True
        self._asked: _Asked = {}  # that the plan was made with
        self._captured: tuple[fx.GraphModule, Callable[[fx.GraphModule, _Asked], object]] | None = None

    def planned(self, **asked: object) -> Plan | None:
        """The graph's plan, and nothing compiled. `asked`: with these options, as if its parameters lived where
        `placement` says. Plans can be asked for again, with other options too: the graph is captured once."""
        self.capture()
        if self._captured is not None and (self.plan is None or asked != self._asked):
            module, plan = self._captured
            plan(copied_module(module), asked)  # planning changes the graph, and may fail
            self._asked = asked
        return self.plan

    def capture(self) -> None:
        """Get at the graph that is to be planned, and no further."""
        if self._captured is None and self.plan is None:
            self._compiles = False
            with suppress(_Captured):
                self.compile()

    def compile(self) -> Callable[..., Any]:
        """Plan the graph; the result is called with the values of the graph's inputs."""
        if self.config.compute == "inductor" and self._compiles:
            self._check_can_compile()
        if self._compiles and self.holds_sizes:
            hold_sizes([graph_input.given for graph_input in self._inputs])
        self._together.check_together(self._inputs)
        if self._rates is None:  # while values can be computed
            self._rates = self._together.rates_of_first(self._inputs, self._measured)
        try:
            compiled = self._compiled()
        except RuntimeError as error:
            if not (self._compiles and _is_of_overlap(error)):
                raise
            return self._uncompiled(error)
        self._together.compare()
        self._inputs = []  # all is planned by now, and the model may die before its compiled code

        first = True

        def call(*arguments: Any) -> Any:
            nonlocal first
            inputs = [argument if type(argument) is StoredTensor else local_input(argument) for argument in arguments]
            if first:
                self._reserve(inputs)
                self._together.check_first(inputs)
                first = False
            stored = [argument for argument in inputs if isinstance(argument, StoredTensor)]
            for argument in stored:
                if not argument.expects_gradient:
                    argument.expect_gradient()
            if not (torch.is_grad_enabled() and stored):
                return compiled(*inputs)
            earlier = compiled_nodes(inputs)
            results = compiled(*inputs)
            refuse_second_derivatives(compiled_nodes([*inputs, *tree_leaves(results)]) - earlier)
            return results

        return call

    def _compiled(self) -> Callable[..., Any]:
        with taking_local(self._module, self._inputs), refusing_lost_writes(self._module, self._inputs):
            return aot_module_simplified(
                self._module,
                traced(self._inputs),
                fw_compiler=lambda gm, example_inputs: self._bind(gm, "forward"),
                bw_compiler=lambda gm, example_inputs: self._bind(gm, "backward"),
                inference_compiler=self._inference,
                partition_fn=self._partition,
                keep_inference_input_mutations=True,
            )

    def _uncompiled(self, reason: RuntimeError) -> Callable[..., Any]:
        """The graph as it was captured, which eager code runs over stored parameters: each operation gathers what it
        takes. Raises: ConfigError where the batch is to be divided."""
        names = " and ".join(sharing_memory(self._inputs))
        overlapping = f"the model writes to inputs that overlap in memory ({names})"
        if self.holds_sizes:
            raise ConfigError(
                f"{overlapping}, and can't be divided into micro-batches: call it with copies"
            ) from reason
        log.warning(
            "%s, and AOTAutograd captures no such graph with stored parameters: it runs uncompiled, and each operation "
            "gathers the parameters it uses. Call it with copies of these inputs to have it planned",
            overlapping,
        )
        module, self._inputs = self._module, []
        return module.forward

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **arguments: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._now_or_later(joint, partial(self._plan_graph, training=(joint_inputs, arguments)))

    def _inference(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._now_or_later(gm, self._plan_graph)
        return self._bind(gm, "inference")

    def _now_or_later(self, module: fx.GraphModule, plan: Callable[[fx.GraphModule, _Asked], Any]) -> Any:
        """Plan what was captured. Where plans are all that is wanted, keep it, and capture no further: what AOTAutograd
        does after that takes as long."""
        if self._compiles:
            return plan(module, {})
        context = TracingContext.get()

        def later(module: fx.GraphModule, asked: _Asked) -> None:
            with tracing(context), context.fake_mode or nullcontext():
                plan(module, asked)

        self._captured = (module, later)
        raise _Captured

    def _plan_graph(
        self, module: fx.GraphModule, asked: _Asked, training: tuple[Any, dict[str, Any]] | None = None
    ) -> list[fx.GraphModule]:
        """The planned graphs: forward and backward of a joint graph, with what the partitioner gets besides that as
        `training`; or inference."""
        started = time.perf_counter()
        graph, groups = module.graph, self._together.groups
        written = noted_writes(graph, groups)
        tiles, made, treatments = tiles_of(graph, self._inputs, groups, asked.get("placement"))
        context = GraphContext(
            "inference",
            self.config_with(asked),
            tiles,
            made=made,
            treatments=treatments,
            unmoved=unmoved_bytes(self._inputs),
            written=written,
            rates=self._rates or NOMINAL,
        )
        fingerprint = fingerprint_of(graph, context, roles_of(graph, self._inputs))
        kind: GraphKind = "inference" if training is None else "forward"
        given = plan_for(self._plans, fingerprint, kind, groups) if self._plans else None
        following = () if given is None else (given,)
        with about_given(given) if given else nullcontext():
            if training is None:
                plan = follow_inference if given else plan_inference
                planned = [(module, plan(module, context, *following))]
            else:
                joint_inputs, arguments = training
                context = self._of_joint(graph, context, arguments["num_fwd_outputs"])
                self._gradients = context.gradients
                snapshot_written_inputs(graph, written_behind(graph))
                plan = follow_training if given else plan_training

                def bytes_of_activations() -> int:
                    _, (_, of_backward) = plan_training(copied_module(module), joint_inputs, context, **arguments)
                    return of_backward.kept

                context = context if given else self._together.with_room(context, bytes_of_activations)
                planned = plan(module, joint_inputs, context, *following, **arguments)
        graphs = [(module.graph, context) for module, context in planned]
        for graph, context in graphs:
            self._together.note_collectives(graph, context)
        self._contexts = {context.planned_kind: context for _, context in graphs}
        self.graphs = {context.planned_kind: graph for graph, context in graphs}
        self.plan = replace(plan_of(graphs), fingerprint=fingerprint)
        seconds = time.perf_counter() - started
        log.debug("a graph of %d tiles was planned in %.1f s", len(tiles), seconds, extra={"planning_seconds": seconds})
        return [module for module, _ in planned]

    def config_with(self, asked: _Asked) -> Config:
        """The options, with what places all stored parameters among the inputs as they are, or as is `asked`."""
        stored = {graph_input.name: graph_input.taken for graph_input in self._inputs if graph_input.is_stored}
        config = Config.of(self.config, {name: value for name, value in asked.items() if name != "placement"})
        return placed(config, placement_of_all(stored, asked.get("placement")))

    def _of_joint(self, graph: fx.Graph, context: GraphContext, forward_outputs: int) -> GraphContext:
        """What is known of a joint graph, of which so many outputs are forward's."""
        (output,) = graph.find_nodes(op="output")
        context = replace(
            context,
            kind="joint",
            gradients=gradient_positions(graph, context.tiles, forward_outputs),
            backward_outputs=len(output.args[0]) - forward_outputs,
        )
        if (mesh := self._together.mesh) is None:
            return context
        inputs = {node.name: self._given_for(node) for node in graph.find_nodes(op="placeholder")}
        ranks = None if self._together.alone else self._together.tensor_ranks
        mark_equal(graph, context, replicas_of(graph, context, inputs, mesh, ranks))
        return replace(context, tensor_ranks=mesh.size())

    def _given_for(self, placeholder: fx.Node) -> object:
        """What the caller gives, of which AOTAutograd's input is a part; None: nothing."""
        origin = origin_of(placeholder.meta["desc"])
        return None if origin is None else self._inputs[origin.number].given

    def _measured(self) -> Rates:
        """Return this machine's rates where a choice depends on them; nominal ones where no store can be measured."""
        config = self.config_with({})
        if self._plans:
            return NOMINAL
        stored = next((graph_input.taken for graph_input in self._inputs if graph_input.is_stored), None)
        if config.activations != "auto" or config.device_memory is None or stored is None:
            return NOMINAL
        tier, there = config.activation_tier, all(directory.is_dir() for directory in config.stores)
        if tier == "nvme" and not there:
            return NOMINAL
        uses_disk = tier == "nvme" or config.on_nvme
        stores = config.stores if there and uses_disk else ()
        return measured(stored.device, stored.dtype, tier, stores, self._together.groups.ranks)

    def _reserve(self, arguments: Sequence[Any]) -> None:
        """Set apart what the plan takes of the memories that the stored parameters among `arguments` share.

        At the first call, and not while Dynamo compiles for one thread at a time: a thread that waits for `RUNNING`
        then may be waited for by the thread that has it.
        """
        plan = self.plan
        if plan is None:
            return
        storages = [tensor.stored for tensor in arguments if isinstance(tensor, StoredTensor)]
        storages = [storage for storage in storages if storage.bytes.allocation.is_reserved]
        with RUNNING.turn():
            for tiers in {storage.tiers for storage in storages}:
                devices = {s.device for s in storages if s.tiers is tiers and not s.device.in_host_memory}
                EXECUTOR.tiles.drop_staying()  # what stays would keep regions that are about to be replaced
                tiers.plan(plan.regions, peak_host_bytes(plan), devices)

    def _left_alone(self, module: fx.GraphModule, context: GraphContext) -> dict[int, int]:
        """The tiles whose gradients may be kept as backward computes them, and their positions among its results.

        Autograd leaves a result with the graph's own input, and not in the `grad` of a DTensor that this stands for.
        """
        position_of = {token: position for position, token in context.gradients.items()}
        tokens = {tile: context.keys[tile].token for tile in gradients_left_alone(module.graph)}
        return {t: position_of[tile] for t, tile in tokens.items() if context.tiles[tile].name not in self._standing_in}

    def runnable(self) -> dict[GraphKind, tuple[fx.Graph, dict[str, CompiledRegion]]]:
        """The planned graphs, by kind, as they would run here; and by the names of the nodes that stand for compiled
        regions, if any, what computes these. Raises: ConfigError when there is nothing to compile them with."""
        if self.config.compute != "inductor":
            return {kind: (graph, {}) for kind, graph in self.graphs.items()}
        self._check_can_compile()
        copies: dict[GraphKind, fx.Graph] = {kind: copied(graph) for kind, graph in self.graphs.items()}
        return {kind: (graph, self._regions(graph, self._contexts[kind])) for kind, graph in copies.items()}

    def _check_can_compile(self) -> None:
        check_can_compile(
            {graph_input.given.device for graph_input in self._inputs if isinstance(graph_input.given, torch.Tensor)}
        )

    def _regions(self, graph: fx.Graph, context: GraphContext) -> dict[str, CompiledRegion]:
        """Put the operations of a planned graph into regions. By the names of the nodes that stand for these, what
        computes them."""
        run_passes(graph, context, [FormRegions()])
        assert self.plan is not None
        labels = [operator.label for operator in self.plan.graph(context.planned_kind).operators]
        regions = [node for node in graph.nodes if isinstance(node.target, Region)]
        where = {node: f"operator {(n := operator_of(node))} of {context.kind} ({labels[n]})" for node in regions}
        return {node.name: compiled_region(node.target.module, node.target.text, where[node]) for node in regions}

    def _bind(self, module: fx.GraphModule, kind: GraphKind) -> Callable[[list], Any]:
        context = self._contexts[kind]
        tokens = [key.token for key in context.keys]
        left_alone = self._left_alone(module, context)
        regions = self._regions(module.graph, context) if self.config.compute == "inductor" else {}
        operators = {node.name: operator_of(node) for node in module.graph.nodes if is_compute(node)}
        gradients = self._gradients if kind == "backward" else {}
        ranks = self._together.tensor_ranks
        assert self.plan is not None
        program = Program(module, self.plan, kind, tokens, operators, ranks, left_alone, regions, gradients)

        # A caller that compiles its whole training step must not trace into the runtime.
        run: Any = torch.compiler.disable(lambda arguments: program(arguments))
        run._boxed_call = True  # AOTAutograd then passes a list that the program may empty
        return run


def noted_writes(graph: fx.Graph, groups: Groups) -> dict[str, int]:
    """By token, how often a graph writes to a parameter. See [Note: written parameters].

    Raises: StoredTensorError where many ranks have the parameter.
    """
    counts: Counter[str] = Counter()
    for write in note_writes(graph):
        token, value = operand(write), operand(write, 1)
        if groups.replicas * groups.shards > 1:
            raise StoredTensorError(
                f"the compiled graph writes to a stored parameter ({line_of(value)}) that many ranks train together: "
                "write to it outside of the compiled region, in a function under torch.compiler.disable"
            )
        counts[token.name] += 1
    return dict(counts)


@contextmanager
def refusing_lost_writes(module: fx.GraphModule, inputs: Sequence[GraphInput]) -> Iterator[None]:
    """A block that captures Dynamo's graph `module`.

    Raises: StoredTensorError when the graph writes to a view of a stored tensor, or to a DTensor that it makes of one:
    the value would be lost.
    """
    with watching() as watched:
        yield
    if is_written(watched):
        places = "; ".join(_writes(module, inputs)) or "no line is known"
        raise StoredTensorError(
            f"the compiled graph writes to a view of a stored parameter, or to a DTensor ({places}), and the write "
            "would be lost: write to it outside of the compiled region, in a function under torch.compiler.disable"
        )


def _writes(module: fx.GraphModule, inputs: Sequence[GraphInput]) -> list[str]:
    """Where operations that write in place take what comes from a stored parameter: its name, and the line."""
    placeholders = zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
    sources = {node: graph_input.name for node, graph_input in placeholders if graph_input.is_stored}
    places: list[str] = []
    for node in module.graph.nodes:
        source = next((sources[argument] for argument in node.all_input_nodes if argument in sources), None)
        if source is None or node.op == "output":
            continue
        if _is_in_place(node):
            places.append(f"'{source}': {line_of(node)}")
        if isinstance(node.meta.get("example_value"), torch.Tensor):
            sources[node] = source
    return list(dict.fromkeys(places))


def _is_in_place(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name == "setitem" or (name.endswith("_") and not name.endswith("__"))


def _is_of_overlap(error: RuntimeError) -> bool:
    """Whether AOTAutograd refuses a graph that writes to one of several inputs that overlap: with ordinary parameters,
    it would make views of one input of them."""
    return "aliased inputs that are mutated" in str(error)


class _Captured(Exception):
    """Ends a capture of which only plans are wanted."""
