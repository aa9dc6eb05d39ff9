"""Captures small real models, keeping every graph between two passes, and runs those graphs.

Parameters are stored tensors without bytes: their values stay here, in `Record.parameters`, so no store is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from passes.reference import Outcome, Reference, assert_close, assert_same
from torch import fx, nn

from zinf_fx.config import Config
from zinf_fx.frontend.capture import Capture
from zinf_fx.passes import pipeline
from zinf_fx.passes.ir.framework import GraphContext, Pass
from zinf_fx.passes.lowering.compute_regions import FormRegions
from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor, as_parameter


@dataclass(frozen=True)
class Stage:
    """One graph as it was before a pass, and after it."""

    pass_: Pass
    before: fx.Graph
    context_before: GraphContext
    after: fx.Graph
    context_after: GraphContext
    module: fx.GraphModule

    @property
    def kind(self) -> str:
        return self.context_after.kind


@dataclass
class Record:
    """Holds what happened to one captured model.

    `parameters`: full values by name; `trainable`: the names of those with gradients.
    `inputs`: by placeholder name, the last values that the forward and backward graph were called with.
    `gradients`: by parameter name, what its offloads summed to.
    """

    parameters: dict[str, torch.Tensor]
    trainable: frozenset[str] = frozenset()
    stages: list[Stage] = field(default_factory=list)
    planned: dict[str, tuple[fx.GraphModule, GraphContext]] = field(default_factory=dict)
    joint: tuple[fx.GraphModule, GraphContext, dict[str, Any]] | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    captures: int = 0

    def stage(self, name: str, kind: str | None = None) -> Stage:
        return next(s for s in self.stages if s.pass_.name == name and kind in (None, s.kind))

    def run(self, graph: fx.Graph, context: GraphContext, module: fx.GraphModule) -> Outcome:
        """Run one graph on the recorded inputs, from a fixed seed."""
        torch.manual_seed(7)
        names = [node.name for node in graph.find_nodes(op="placeholder")]
        copies = [_copy(self.inputs[name]) for name in names]
        return Reference(module, graph, context, self.parameters).run_to_outcome(copies)


def compiled(model: nn.Module, config: Config | None = None, dynamic: bool | None = None) -> tuple[Callable, Record]:
    """`model` with stored parameters, compiled through capture and all passes; graphs run by the reference.

    The model is changed: its parameters become stored tensors without bytes.
    """
    config = config or Config(placement="infinity-nvme", pack=None)
    record = Record(
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        trainable=frozenset(name for name, p in model.named_parameters() if p.requires_grad),
    )
    _take_bytes_away(model, config)

    def backend(module: fx.GraphModule, inputs: list) -> Callable:
        record.captures += 1
        with _recording(record):
            return _ReferenceCapture(module, inputs, config, record).compile()

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic), record


def train(model: nn.Module, *inputs: Any, config: Config | None = None) -> Record:
    """Compile `model` and take one forward and backward; the model must return a scalar."""
    call, record = compiled(model, config)
    torch.manual_seed(7)
    call(*inputs).backward()
    return record


class _ReferenceCapture(Capture):
    def __init__(self, module: fx.GraphModule, inputs: list, config: Config, record: Record) -> None:
        super().__init__(module, inputs, config)
        self._record = record

    def _partition(self, joint: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Any:
        with mock.patch("zinf_fx.frontend.capture.plan_training", self._plan(arguments)):
            return super()._partition(joint, joint_inputs, **arguments)

    def _plan(self, arguments: dict[str, Any]) -> Callable:
        def plan(joint: fx.GraphModule, joint_inputs: Any, context: GraphContext, **rest: Any) -> Any:
            twin = fx.GraphModule(joint, copy_graph(joint.graph))
            self._record.joint = (twin, context, arguments)
            return pipeline.plan_training(joint, joint_inputs, context, **rest)

        return plan

    def _bind(self, module: fx.GraphModule, kind: str) -> Callable:
        context = self._contexts[kind]
        self._record.planned[kind] = (module, context)
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]

        def run(arguments: list) -> Any:
            values = list(arguments)
            arguments.clear()
            self._record.inputs.update(zip(names, map(_copy, values), strict=True))
            reference = Reference(module, module.graph, context, self._record.parameters)
            results = reference.run(*values)
            reference.check_all_given_back()
            for name, gradient in reference.gradients.items():
                held = self._record.gradients
                held[name] = held[name] + gradient if name in held else gradient
            return results

        run._boxed_call = True
        return run


@contextmanager
def _recording(record: Record) -> Iterator[None]:
    """Keep a copy of every graph before and after each pass."""

    def run_passes(graph: fx.Graph, context: GraphContext, passes: list[Pass]) -> GraphContext:
        now = copy_graph(graph)
        for pass_ in passes:
            before, context_before = now, context
            context = original(graph, context, [pass_])
            now = copy_graph(graph)
            record.stages.append(Stage(pass_, before, context_before, now, context, graph.owning_module))
        return context

    original = pipeline.run_passes
    with mock.patch.object(pipeline, "run_passes", run_passes):
        yield


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy with the same node names and metadata."""
    twin = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = twin.node_copy(node, copies.__getitem__)
        copies[node].name = node.name
    return twin


def _take_bytes_away(model: nn.Module, config: Config) -> None:
    twins: dict[nn.Parameter, StoredTensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in twins:
                shard = LocalShard(Shards.of(parameter.numel(), 1, config.on_nvme))
                nowhere = Allocation.unreserved(config.placement.parameters, [parameter.numel()], parameter.dtype)
                storage = TensorStorage(config, shard, nowhere)
                twin = StoredTensor.of(storage, parameter.shape, parameter.device, parameter.requires_grad)
                twins[parameter] = as_parameter(twin)
            module._parameters[name] = twins[parameter]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def assert_trains_like_eager(
    model: nn.Module, *inputs: Any, config: Config | None = None, tolerance: float = 1e-4
) -> Record:
    """Loss, gradients and buffers equal eager PyTorch's bitwise, and no pass changes what its graph computes.

    With tiling, within `tolerance`.
    """
    close = partial(assert_close, tolerance=tolerance)
    same = close if config is not None and isinstance(config.tile, int) else assert_same
    eager = copy.deepcopy(model)
    call, record = compiled(model, config)
    torch.manual_seed(7)
    expected = eager(*copy.deepcopy(inputs))
    expected.backward()
    torch.manual_seed(7)
    loss = call(*inputs)
    loss.backward()
    same(loss.detach(), expected.detach(), "loss")
    gradients = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    same(record.gradients, gradients, "gradient of")
    same(dict(model.named_buffers()), dict(eager.named_buffers()), "buffer")
    assert_passes_keep_values(record, tolerance)
    assert_regions_keep_values(record)
    return record


def assert_regions_keep_values(record: Record) -> None:
    """Run every planned graph, and what becomes of it where operators are compiled, without compiling them."""
    for kind, (module, context) in record.planned.items():
        graph = copy_graph(module.graph)
        expected = record.run(graph, context, module)
        actual = record.run(graph, pipeline.run_passes(graph, context, [FormRegions()]), module)
        for name in ("results", "gradients", "inputs"):
            assert_same(getattr(actual, name), getattr(expected, name), f"{kind} graph in regions: {name}")


def assert_passes_keep_values(record: Record, tolerance: float = 1e-4) -> None:
    """Run every graph before and after each pass, and the joint graph against forward and backward."""
    graph, after = None, None
    for stage in record.stages:
        if getattr(stage.pass_, "leaving", ()):  # other values cross from forward to backward from here on
            continue
        # Most passes begin with the graph that the last one left, which has run.
        before = after if stage.before is graph else record.run(stage.before, stage.context_before, stage.module)
        graph, after = stage.after, record.run(stage.after, stage.context_after, stage.module)
        what = f"{stage.kind} graph after {stage.pass_.name}:"
        same = partial(assert_close, tolerance=tolerance) if stage.pass_.changes_numerics else assert_same
        for name in ("results", "gradients", "inputs"):
            same(getattr(after, name), getattr(before, name), f"{what} {name}")
