"""partition: PyTorch's partitioner, and the refusal to save a weight."""

from __future__ import annotations

import pytest
import torch
from gate import named
from passes.capturing import Record, copy_graph, train
from passes.models import CASES, IN_THE_GATE, Expression, trained
from passes.reference import assert_same
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.activations.keep import KeepActivations
from zinf_fx.passes.ir.framework import nodes_calling
from zinf_fx.passes.ir.printer import print_graph
from zinf_fx.passes.lowering.partition import partition
from zinf_fx.passes.lowering.recompute_gathers import RecomputeGathers
from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients
from zinf_fx.passes.pipeline import run_passes


@pytest.mark.parametrize("name", named(CASES, IN_THE_GATE))
def test_forward_and_backward_compute_what_the_joint_graph_computes(name: str) -> None:
    record = trained(name)
    if record.joint is None:
        return
    module, context, arguments = record.joint
    joint = record.run(module.graph, context, module)
    forward, backward = record.stage("sink_gathers", "forward"), record.stage("sink_gathers", "backward")
    ahead = record.run(forward.before, forward.context_before, forward.module)
    back = record.run(backward.before, backward.context_before, backward.module)
    count = arguments["num_fwd_outputs"]
    assert_same(ahead.results[:count], joint.results[:count])
    assert_same(back.results, joint.results[count:])
    assert_same(back.gradients, joint.gradients)


@pytest.mark.parametrize("name", named(CASES, IN_THE_GATE))
def test_every_reduction_is_in_backward(name: str) -> None:
    record = trained(name)
    if record.joint is None:
        return
    backward, context = record.planned["backward"]
    reduced = [context.tile_of(node).name for node in nodes_calling(backward.graph, ops.reduce_scatter)]
    assert len(reduced) == len(set(reduced)) and set(reduced) <= record.trainable
    assert set(reduced) == set(record.gradients)
    assert not list(nodes_calling(record.planned["forward"][0].graph, ops.reduce_scatter))


def two_layers() -> Record:
    stack = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    return train(Expression(lambda m, x: m.stack(x).sum(), stack=stack), torch.randn(2, 4))


def test_a_bias_that_only_forward_uses_has_its_token_in_backward() -> None:
    backward, context = two_layers().planned["backward"]
    assert "  stack.0.bias : f32[4] on nvme, gradient on host\n" in print_graph(backward.graph, context)
    assert not [n for n in nodes_calling(backward.graph, ops.fetch) if context.tile_of(n).name == "stack.0.bias"]


@pytest.mark.parametrize("what", ["gather", "t"])
def test_a_saved_weight_is_refused(what: str) -> None:
    """A weight would be saved, were the gathers not tagged."""
    module, context, arguments = two_layers().joint
    joint = fx.GraphModule(module, copy_graph(module.graph))
    context = run_passes(joint.graph, context, [KeepActivations(), RecomputeGathers(), ReduceGradients()])
    for node in joint.graph.nodes:
        if node.target is ops.gather or (what == "t" and node.target is torch.ops.aten.t.default):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with pytest.raises(PlanError, match=r"would save the value of 'stack\.2\.weight' for backward"):
        partition(joint, [], context, **arguments)


def test_the_message_names_all_weights_of_a_fused_one() -> None:
    module, context, arguments = trained("concatenated_weights").joint
    joint = fx.GraphModule(module, copy_graph(module.graph))
    context = run_passes(joint.graph, context, [KeepActivations(), ReduceGradients()])
    with pytest.raises(PlanError, match=r"the value of 'q\.weight' and 'k\.weight' for backward"):
        partition(joint, [], context, **arguments)
