"""keep_activations: what eager PyTorch saves is saved, and the user's checkpointing is respected."""

from __future__ import annotations

from passes.building import Builder, aten
from passes.models import trained
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx.passes.activations.keep import KeepActivations
from zinf_fx.passes.ir.printer import print_graph, type_text


def test_golden() -> None:
    built = Builder("joint", {"a.weight": (4, 4)})
    x, tangent = built.input(2, 4), built.input(2, 4, name="tangents_1")
    weight = built.gather("a.weight")
    product = built.call(aten.mm.default, x, weight)
    checkpointed = built.call(aten.sin.default, product)
    checkpointed.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE  # as torch.utils.checkpoint leaves it
    cosine = built.call(aten.cos.default, product)
    gradient = built.call(aten.mul.Tensor, tangent, cosine)
    built.returns(checkpointed, None, gradient, backward=2)
    built.check(
        KeepActivations(),
        before="""
        joint graph
        inputs
          a.weight : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : f32[2, 4]
        nodes
          %2 = gather a.weight : f32[4, 4]
          %3 = aten.mm(%0, %2) : f32[2, 4]
          %4 = aten.sin(%3) : f32[2, 4] [prefer_recompute]
          %5 = aten.cos(%3) : f32[2, 4]
          %6 = aten.mul.Tensor(%1, %5) : f32[2, 4]
        return %4
        return of backward None, %6
        """,
        after="""
        joint graph
        inputs
          a.weight : f32[4, 4] on nvme, gradient on host
          %0 : f32[2, 4]
          %1 : f32[2, 4]
        nodes
          %2 = gather a.weight : f32[4, 4]
          %3 = aten.mm(%0, %2) : f32[2, 4] [must_save]
          %4 = aten.sin(%3) : f32[2, 4] [prefer_recompute]
          %5 = aten.cos(%3) : f32[2, 4] [must_save]
          %6 = aten.mul.Tensor(%1, %5) : f32[2, 4] [must_save]
        return %4
        return of backward None, %6
        """,
    )


def test_saves_what_eager_saves() -> None:
    record = trained("mlp")
    forward, context = record.planned["forward"]
    results = next(iter(forward.graph.find_nodes(op="output"))).args[0]
    saved = [type_text(node.meta["val"]) for node in results[1:] if node.name not in context.tiles]
    # x; then per block: mean and rstd, the normalised input, what gelu takes, what it gives; and the residual stream.
    block = ["f32[3, 1]", "f32[3, 1]", "f32[3, 4]", "f32[3, 8]", "f32[3, 8]"]
    assert sorted(saved) == sorted(["f32[3, 4]"] * 3 + block * 3), print_graph(forward.graph, context)


def test_checkpointed_blocks_save_their_inputs_only() -> None:
    record = trained("checkpointed")
    forward, context = record.planned["forward"]
    results = next(iter(forward.graph.find_nodes(op="output"))).args[0]
    saved = [type_text(node.meta["val"]) for node in results[1:] if node.name not in context.tiles]
    assert saved == ["f32[3, 4]"] * 3, print_graph(forward.graph, context)
