"""spec: each rule refuses a graph that breaks it in exactly one way, naming pass, rule, node and neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from passes.building import Builder, aten
from torch import fx

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.ir import spec
from zinf_fx.passes.ir.framework import (
    OPERATOR,
    Pass,
    PrologueTransfer,
    event_of,
    give_event,
    nodes_calling,
    operator_of,
    set_event,
)
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.offload_gradients import OffloadGradients
from zinf_fx.passes.lowering.reduce_gradients import ReduceGradients
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.scheduling.prefetch import Prefetch
from zinf_fx.passes.scheduling.residency import choose_residency

KIB = 1024


def joint() -> Builder:
    built = Builder("joint", {"a": (16, 16)})
    tangent = built.input(16, 16, name="tangents_1")
    a = built.gather("a")
    da = built.call(aten.mm.default, tangent, a)
    built.returns(built.call(aten.relu.default, a), da, gradients={0: "a"}, backward=1)
    built.run(ReduceGradients())
    return built


def regions() -> Builder:
    built = Builder("forward", {"a": (16, 16), "b": (16, 16)})
    x = built.input(16, 16)
    y = built.call(aten.mm.default, x, built.gather("a"))
    built.returns(built.call(aten.mm.default, y, built.gather("b")))
    built.run(SinkGathers(), Regions())
    return built


def lowered() -> Builder:
    built = regions()
    built.run(LowerGathers())
    return built


def forward() -> Builder:
    """Build two operators; the next graph needs `b`, then `a`."""
    built = lowered()
    a, b = 0, 1
    head = [PrologueTransfer(op, b, 3 - number) for number, op in enumerate(ops.TRANSFERS)]
    built.knows(successor_prologue=(*head, PrologueTransfer(ops.fetch, a, 1)))
    built.run(Prefetch())
    return built


def backward() -> Builder:
    built = Builder("backward", {"a": (16, 16), "b": (16, 16)})
    tangent = built.input(16, 16, name="tangents_1")
    db = built.call(aten.mm.default, tangent, tangent)
    dx = built.call(aten.mm.default, tangent, built.gather("b"))
    da = built.call(aten.mm.default, dx, built.gather("a"))
    built.returns(da, db, gradients={0: "a", 1: "b"}, backward=2)
    built.run(ReduceGradients(), SinkGathers(), Regions(), LowerGathers(), OffloadGradients(), Prefetch())
    return built


def resident() -> Builder:
    """The tile of the last operator is that of the first, and stays in memory all the time."""
    built = Builder("inference", {"a": (16, 16), "b": (16, 16)}, device_memory=2 * KIB, prefetch=None)
    x = built.input(16, 16)
    for name in "aba":
        x = built.call(aten.mm.default, x, built.gather(name))
    built.returns(x)
    built.run(SinkGathers(), Regions(), LowerGathers(), Prefetch(None))
    built.run(*choose_residency([(built.graph, built.context)], spare=0))
    return built


def the(built: Builder, op: object, tile: str, for_backward: bool = False) -> fx.Node:
    """Return the node that calls `op` for `tile`."""
    return next(
        n
        for n in nodes_calling(built.graph, op)
        if n.args[0] is built.token(tile) and (ops.EVENT in n.meta and event_of(n).for_backward) == for_backward
    )


def output(built: Builder) -> fx.Node:
    return next(iter(built.graph.find_nodes(op="output")))


def insert(
    built: Builder, before: fx.Node, op: object, *args: object, operator: int = 0, for_backward: bool = False
) -> fx.Node:
    with built.graph.inserting_before(before):
        node = built.graph.call_function(op, args)
    if op in ops.LOWERED and "lowered" in built.context.provided:
        give_event(node, built.context, operator, for_backward=for_backward)
    else:
        node.meta[OPERATOR] = operator
    return node


def put(node: fx.Node, operator: int) -> None:
    set_event(node, replace(event_of(node), operator=operator))


# Name: a valid graph, what is done to it, and what the error says.
Break = Callable[[Builder], object]
CASES: dict[str, tuple[Callable[[], Builder], Break, str]] = {}


def case(make: Callable[[], Builder], message: str) -> Callable[[Break], Break]:
    def register(breaks: Break) -> Break:
        CASES[breaks.__name__.replace("_", " ")] = (make, breaks, message)
        return breaks

    return register


@case(forward, r"the placeholders are those of the captured graph, but they are \('primals_1', 'primals_2'\) instead")
def a_placeholder_is_gone(built: Builder) -> None:
    x = next(n for n in built.graph.nodes if n.name == "primals_x")
    x.replace_all_uses_with(the(built, ops.wait, "a"))
    built.graph.erase_node(x)


@case(regions, r"only transfers use a tile's token, but the token of 'a' is computed with")
def a_token_is_computed_with(built: Builder) -> None:
    insert(built, next(nodes_calling(built.graph, aten.mm.default)), aten.relu.default, built.token("a"))


@case(regions, "operators are numbered in order, none is left out, but a node belongs to none")
def a_node_has_no_operator(built: Builder) -> None:
    del next(nodes_calling(built.graph, aten.mm.default)).meta[OPERATOR]


@case(regions, "but operator 0 follows operator 1")
def operators_fall(built: Builder) -> None:
    output(built).prev.meta[OPERATOR] = 0


@case(regions, "but operator 3 follows operator 1")
def an_operator_is_left_out(built: Builder) -> None:
    output(built).prev.meta[OPERATOR] = 3


@case(regions, "but operator 1 follows the prologue")
def the_first_operator_is_left_out(built: Builder) -> None:
    for node in built.graph.nodes:
        if node.meta.get(OPERATOR) == 0:
            node.meta[OPERATOR] = 1


@case(joint, r"each gradient of a tile is reduce-scattered, but output 0 of backward isn't the one of 'a'")
def a_gradient_is_not_reduced(built: Builder) -> None:
    shard = the(built, ops.reduce_scatter, "a")
    output(built).replace_input_with(shard, shard.args[1])


@case(joint, r"each gradient of a tile is reduce-scattered, but output 0 of backward isn't the one of 'a'")
def a_gradient_is_lost(built: Builder) -> None:
    output(built).args = ((output(built).args[0][0], None),)


@case(joint, r"each gradient of a tile is reduce-scattered once, but that of 'a' is once more")
def a_gradient_is_reduced_twice_in_the_joint_graph(built: Builder) -> None:
    shard = the(built, ops.reduce_scatter, "a")
    insert(built, output(built), ops.reduce_scatter, *shard.args)


@case(lowered, "every gather is lowered, but that of 'a' is left")
def a_gather_is_left(built: Builder) -> None:
    the(built, ops.wait, "a").target = ops.gather


STEPS = (*ops.TRANSFERS, ops.wait, ops.release)
for step, following in zip(STEPS, [*STEPS[1:], STEPS[0]], strict=True):
    name, due = ops.KINDS[step], ops.KINDS[following]

    def missing(built: Builder, step: object = step) -> None:
        node = the(built, step, "a")
        node.replace_all_uses_with(next(n for n in built.graph.nodes if n.name == "primals_x"))
        built.graph.erase_node(node)

    def doubled(built: Builder, step: object = step) -> None:
        node = the(built, step, "a")
        insert(built, node, step, *node.args)

    ends = "the lifetime of 'a' ends before its release"
    comes = rf"events\[\d\] \({due}\) of 'a' comes where {name} is due"
    CASES[f"no {name}"] = (lowered, missing, "in this order, but " + (ends if name == "release" else comes))
    again = rf"events\[\d\] \({name}\) of 'a' comes where {due} is due"
    CASES[f"two {name}"] = (lowered, doubled, f"in this order, but {again}")


@case(lowered, r"in this order, but events\[0\] \(upload\) of 'a' comes where fetch is due")
def an_upload_comes_before_its_fetch(built: Builder) -> None:
    the(built, ops.fetch, "a").prepend(the(built, ops.upload, "a"))


@case(lowered, r"in this order, but events\[2\] \(wait\) of 'a' comes where allgather is due")
def a_wait_comes_before_its_allgather(built: Builder) -> None:
    the(built, ops.upload, "a").append(the(built, ops.wait, "a"))


@case(lowered, "nothing reads a tile after its release, but 'a' has been released")
def a_tile_is_read_after_its_release(built: Builder) -> None:
    the(built, ops.wait, "a").append(the(built, ops.release, "a"))


@case(lowered, "nothing reads a tile after its release, but 'a' has been released")
def a_view_is_read_after_the_release(built: Builder) -> None:
    wait = the(built, ops.wait, "a")
    view = insert(built, wait.next, aten.unbind.int, wait)
    insert(built, output(built), aten.cat.default, view, operator=1)


@case(lowered, "results and gradients share no memory with a tile, but this one may be memory of 'b'")
def a_result_is_memory_of_a_tile(built: Builder) -> None:
    wait = the(built, ops.wait, "b")
    view = insert(built, wait.next, aten._unsafe_view.default, wait, [256], operator=1)
    output(built).args = ((*output(built).args[0], view),)


@case(backward, "results and gradients share no memory with a tile, but this one may be memory of 'b'")
def a_gradient_is_memory_of_a_tile(built: Builder) -> None:
    shard, wait = the(built, ops.reduce_scatter, "a"), the(built, ops.wait, "b")
    shard.args = (shard.args[0], wait)
    shard.append(the(built, ops.release, "b"))
    put(the(built, ops.release, "b"), operator_of(shard))


@case(backward, "offloaded once, but that of 'a' is still an output")
def a_gradient_is_still_an_output(built: Builder) -> None:
    output(built).args = ((the(built, ops.reduce_scatter, "a"), None),)


@case(backward, "offloaded once, but that of 'a' is not offloaded")
def a_gradient_is_not_offloaded(built: Builder) -> None:
    built.graph.erase_node(the(built, ops.offload, "a"))


@case(backward, r"events\[\d+\] \(offload\) of 'b' comes where reduce_scatter is due")
def a_gradient_is_offloaded_twice(built: Builder) -> None:
    node = the(built, ops.offload, "b")
    insert(built, node, ops.offload, *node.args, operator=operator_of(node))


@case(backward, "reduce-scattered once, but that of 'b' is once more")
def a_gradient_is_reduced_twice(built: Builder) -> None:
    node = the(built, ops.reduce_scatter, "b")
    insert(built, node, ops.reduce_scatter, *node.args, operator=operator_of(node))


@case(backward, "offloaded once, but what is offloaded for 'b' is not its reduce-scattered gradient")
def the_wrong_gradient_is_offloaded(built: Builder) -> None:
    last = the(built, ops.offload, "b")
    output(built).prepend(last)
    put(last, 2)
    last.args = (last.args[0], the(built, ops.reduce_scatter, "a"))


@case(
    forward,
    r"bytes in flight stay within the budget, but the prologue has 2048 of 1024 bytes \(tile '.' \(1024 bytes\)",
)
def more_is_in_flight_than_the_budget_allows(built: Builder) -> None:
    built.knows(config=replace(built.context.config, device_memory=KIB))


@case(backward, r"but operator 2 has 3072 of 2048 bytes \(.*gradient of 'b' \(1024 bytes\)")
def gradients_wait_longer_than_the_budget_allows(built: Builder) -> None:
    for op in ops.TRANSFERS:
        for tile in ("a", "b"):
            node, use = the(built, op, tile), the(built, ops.wait, tile)
            use.prepend(node)
            put(node, operator_of(use))
    built.knows(config=replace(built.context.config, device_memory=2 * KIB))


@case(forward, "forward starts what backward needs in its prologue, but it has no need of one more for 'a'")
def the_turn_moves_what_the_next_graph_does_not_need(built: Builder) -> None:
    insert(built, output(built), ops.upload, built.token("a"), for_backward=True, operator=1)


@case(forward, r"but events\[\d+\] \(fetch\) of 'b' comes where nothing more for backward is due")
def the_turn_moves_a_tile_twice(built: Builder) -> None:
    insert(built, output(built), ops.fetch, built.token("b"), for_backward=True, operator=1)


@case(backward, r"events\[\d+\] \(fetch\) of 'b' is marked as one for backward")
def a_backward_graph_has_a_turn(built: Builder) -> None:
    insert(built, output(built), ops.fetch, built.token("b"), for_backward=True, operator=2)


@case(forward, r"but events\[\d+\] \(upload\) of 'b' comes where fetch is due")
def forward_uploads_for_backward_before_it_fetches(built: Builder) -> None:
    fetch = the(built, ops.fetch, "b", for_backward=True)
    output(built).prepend(fetch)
    put(fetch, 1)


@case(forward, "but there is no fetch of 'a'")
def the_turn_leaves_a_tile_out(built: Builder) -> None:
    built.graph.erase_node(the(built, ops.fetch, "a", for_backward=True))


@case(resident, r"that of 'a' doesn't go with its next fetch \(what a release leaves in memory is there at the next")
def what_is_found_has_been_released(built: Builder) -> None:
    node = the(built, ops.release, "a")
    set_event(node, replace(event_of(node), resident=False))


@case(resident, "but only some of the transfers of 'a' find it")
def what_is_found_is_moved_again(built: Builder) -> None:
    node = the(built, ops.upload, "a")
    set_event(node, replace(event_of(node), resident=False))


@pytest.mark.parametrize("make", [joint, regions, lowered, forward, backward, resident])
def test_the_graphs_are_valid(make: Callable[[], Builder]) -> None:
    built = make()
    spec.check(built.graph, built.context, _placeholders(built), "some pass")


@pytest.mark.parametrize("name", CASES)
def test_broken(name: str) -> None:
    make, breaks, message = CASES[name]
    built = make()
    placeholders = _placeholders(built)
    breaks(built)
    with pytest.raises(PlanError, match=message) as error:
        spec.check(built.graph, built.context, placeholders, "some pass")
    first, *lines = str(error.value).splitlines()
    assert first.startswith(f"{built.context.kind} graph after pass 'some pass': ")
    assert len(lines) >= 3 and sum(line.startswith("->") for line in lines) == 1


def test_the_message() -> None:
    built = lowered()
    the(built, ops.wait, "a").append(the(built, ops.release, "a"))
    with pytest.raises(PlanError) as error:
        spec.check(built.graph, built.context, _placeholders(built), "some pass")
    assert str(error.value).splitlines() == [
        "forward graph after pass 'some pass': nothing reads a tile after its release, but 'a' has been released",
        "    %1 = wait a : f32[16, 16]  # lower_gathers",
        "    release a  # lower_gathers",
        "->  %2 = aten.mm(%0, %1) : f32[16, 16]",
        "    fetch b  # lower_gathers",
        "    upload b  # lower_gathers",
    ]


def test_every_rule_is_broken_by_some_case() -> None:
    messages = []
    for make, breaks, _ in CASES.values():
        built = make()
        placeholders = _placeholders(built)
        breaks(built)
        with pytest.raises(PlanError) as error:
            spec.check(built.graph, built.context, placeholders, "some pass")
        messages.append(str(error.value))
    for rule in spec.RULES:
        assert any(f"{rule.text}, but" in message for message in messages), rule.text


def test_a_pass_without_what_it_requires_is_refused() -> None:
    built = Builder("forward", {"a": (4, 4)})
    built.returns(built.gather("a"))
    with pytest.raises(PlanError, match=r"pass 'lower_gathers' requires \['operators'\], which no pass before it"):
        built.run(LowerGathers())


def test_each_pass_is_checked() -> None:
    class Breaks(Pass):
        name = "breaks"

        def __call__(self, graph: fx.Graph, context: object) -> object:
            next(nodes_calling(graph, ops.wait)).target = ops.gather
            return context

    with pytest.raises(PlanError, match="forward graph after pass 'breaks': every gather is lowered"):
        lowered().run(Breaks())


def _placeholders(built: Builder) -> tuple[str, ...]:
    return tuple(node.name for node in built.graph.find_nodes(op="placeholder"))
