"""The printer shows every state of a graph as text that depends on nothing but the graph."""

from __future__ import annotations

import operator
from dataclasses import replace
from textwrap import dedent

import pytest
import torch
from passes.building import Builder, aten
from passes.capturing import copy_graph
from torch.utils.checkpoint import CheckpointPolicy

from zinf_fx import ops
from zinf_fx.passes.ir import printer
from zinf_fx.passes.ir.framework import MADE_BY, OPERATOR, give_event
from zinf_fx.passes.ir.printer import print_around, print_graph, type_text
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.scheduling.prefetch import Prefetch
from zinf_fx.plan.schedule import PROLOGUE


def everything() -> Builder:
    built = Builder("backward", {"a.weight": (4, 4), "frozen": (4,)}, frozen=("frozen",), dtype=torch.bfloat16)
    x = built.input(2, 4, dtype=torch.bfloat16)
    token = built.token("a.weight")
    for op in ops.TRANSFERS:
        built.graph.call_function(op, (token,)).meta = {OPERATOR: PROLOGUE, MADE_BY: "prefetch"}
    ahead = built.graph.call_function(ops.fetch, (built.token("frozen"),))
    weight = built.call(ops.wait, token, [4, 4], torch.bfloat16, torch.device("cpu"))
    halves = built.call(aten.split.Tensor, weight, 2, dim=1)
    half = built.call(operator.getitem, halves, 0)
    y = built.call(aten.mm.default, x, half)
    total = built.call(aten.sum.dim_IntList, y, [0], True, dtype=torch.float64)
    built.graph.call_function(ops.release, (token,))
    shard = built.call(ops.reduce_scatter, token, weight)
    built.graph.call_function(ops.offload, (token, shard))
    for node in list(built.graph.nodes)[6:-2]:
        node.meta[OPERATOR] = 0
    for node in list(built.graph.nodes)[-2:]:
        node.meta[OPERATOR] = 1
    give_event(ahead, built.context, 0, for_backward=True)
    built.knows(provided=frozenset({"operators"}))
    built.returns(total, None, token, shard)
    return built


def test_golden() -> None:
    assert everything().text == dedent("""
        backward graph
        inputs
          a.weight : bf16[4, 4] on nvme, gradient on host
          frozen : bf16[4] on nvme
          %0 : bf16[2, 4]
        prologue
          fetch a.weight  # prefetch
          upload a.weight  # prefetch
          allgather a.weight  # prefetch
        operator 0
          fetch frozen for backward
          %1 = wait a.weight : bf16[4, 4]
          %2 = aten.split.Tensor(%1, 2, dim=1) : (bf16[4, 2], bf16[4, 2])
          %3 = %2[0] : bf16[4, 2]
          %4 = aten.mm(%0, %3) : bf16[2, 2]
          %5 = aten.sum.dim_IntList(%4, [0], True, dtype=float64) : f64[1, 2]
          release a.weight
        operator 1
          %6 = reduce_scatter a.weight, %1 : bf16[4, 4]
          offload a.weight, %6
        return %5, None, a.weight, %6
    """).lstrip("\n")


def test_a_joint_graph_shows_what_the_partitioner_is_told() -> None:
    built = Builder("joint", {"a": (4,)})
    weight = built.gather("a")
    weight.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    doubled = built.call(aten.mul.Tensor, weight, 2.0)
    doubled.meta |= {"recompute": CheckpointPolicy.PREFER_SAVE, MADE_BY: "tile"}
    built.returns(doubled, weight, None, backward=2)
    assert built.text == dedent("""
        joint graph
        inputs
          a : f32[4] on nvme, gradient on host
        nodes
          %0 = gather a : f32[4] [must_recompute]
          %1 = aten.mul.Tensor(%0, 2.0) : f32[4] [prefer_save]  # tile
        return %1
        return of backward %0, None
    """).lstrip("\n")


def test_names_of_nodes_do_not_show() -> None:
    built = everything()
    twin = copy_graph(built.graph)
    for node in twin.nodes:
        if node.op == "call_function":
            node.name = f"another_{node.name}"
    assert print_graph(twin, built.context) == built.text


def test_printing_changes_nothing() -> None:
    built = everything()
    assert built.text == built.text
    built.graph.lint()


def test_long_results_are_wrapped() -> None:
    built = Builder("forward", {f"layers.{i}.weight": (4, 4) for i in range(20)})
    built.returns(*(built.token(f"layers.{i}.weight") for i in range(20)))
    lines = built.text.splitlines()
    assert all(len(line) <= 120 for line in lines)
    first = next(i for i, line in enumerate(lines) if line.startswith("return layers.0.weight,"))
    assert len(lines) > first + 2 and all(line.startswith("  layers.") for line in lines[first + 1 :])


def test_around() -> None:
    built = everything()
    node = next(n for n in built.graph.nodes if n.target is aten.mm.default)
    assert print_around(built.graph, built.context, node).splitlines() == [
        "    %2 = aten.split.Tensor(%1, 2, dim=1) : (bf16[4, 2], bf16[4, 2])",
        "    %3 = %2[0] : bf16[4, 2]",
        "->  %4 = aten.mm(%0, %3) : bf16[2, 2]",
        "    %5 = aten.sum.dim_IntList(%4, [0], True, dtype=float64) : f64[1, 2]",
        "    release a.weight",
    ]
    (output,) = built.graph.find_nodes(op="output")
    assert print_around(built.graph, built.context, output).splitlines()[-1].startswith("->return %5")


def test_a_graph_may_be_broken() -> None:
    """What is not yet computed, has no metadata, or is about a tile that the context doesn't know."""
    built = everything()
    mm = next(n for n in built.graph.nodes if n.target is aten.mm.default)
    mm.meta.clear()
    built.context.tiles.clear()
    mm.args[1].args[0].append(mm)
    text = print_graph(built.graph, replace(built.context, provided=frozenset()))
    assert "%5 = aten.mm(%2, <getitem, not yet computed>)\n" in text and "fetch %0" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.empty(2, 0, dtype=torch.bool), "bool[2, 0]"),
        (torch.empty((), dtype=torch.float8_e4m3fn), "float8_e4m3fn[]"),
        ((torch.empty(1), None, [torch.empty(2)]), "(f32[1], none, (f32[2]))"),
        (3, "int"),
    ],
)
def test_types(value: object, text: str) -> None:
    assert type_text(value) == text


def test_the_example_in_the_docstring() -> None:
    built = Builder("forward", {"a.weight": (4, 4)}, frozen=("a.weight",))
    x = built.input(2, 4)
    built.returns(built.call(aten.mm.default, x, built.gather("a.weight")))
    built.run(SinkGathers(), Regions(), LowerGathers(), Prefetch())
    example = printer.__doc__.split("\n\n")[1]
    assert dedent(example) + "\n" == built.text
