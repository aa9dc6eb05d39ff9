"""A planned graph as plain Python that calls the `Run` of an execution between compute nodes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.plan.schedule import PROLOGUE, Event, GraphSchedule, Tile
from zinf_fx.runtime.execute.anomaly import NanSearch, where_computed
from zinf_fx.runtime.execute.inductor import CompiledRegion
from zinf_fx.runtime.execute.workspace import dequantize

_TAKE_A_VALUE = (ops.reduce_scatter, ops.offload, ops.write)
# Bytes of gradients that wait for each other, to be copied to where they live in one call.
_COPIED_TOGETHER = 1 << 20
# What is called for the events of a tile that is where the graph computes, where it isn't named as the event is.
_METHODS_IN_PLACE = {"fetch": None, "upload": None, "allgather": None, "release": "passed"}


@dataclass(frozen=True)
class Here:
    """What is where a graph computes, so that nothing has to be done for it.

    Attributes:
        tiles: those of parameters.
        gradients: those whose gradients are ordinary tensors (see [Note: plain gradients]); of them, `kept` stay as
            they are computed.
        followed: whether somebody is to know when the graph has used a parameter.
        searches_for_nan: whether gradients are searched for NaN.
    """

    tiles: frozenset[int]
    gradients: frozenset[int]
    kept: frozenset[int]
    followed: bool
    searches_for_nan: bool


def bind(
    module: fx.GraphModule,
    tiles: Sequence[Tile],
    operators: Mapping[str, int],
    here: Here,
    gradients: Mapping[int, int],
    regions: Mapping[str, CompiledRegion],
) -> fx.GraphModule:
    """The graph as a function of (run, arguments): its `zinf` nodes become calls of the run's methods, which is told
    when the prologue ends, and when an operator begins and ends, too. Of one rank, there is nothing to gather or
    reduce.

    `operators`: by the names of the nodes that compute, which operator they belong to. A tile's value is a
    list of the parameters in it, and the gradient of a pack a list of theirs: nothing is put together in memory.
    `gradients`: by tile, which output of the graph takes a gradient that is kept: autograd leaves it in the parameter's
    `grad`, or adds it to what is there.
    `regions`: by the names of the nodes that stand for several operations, what computes them.
    `arguments` is a reversed list from which each input is popped, so that inputs die with their last use.
    """
    bound = fx.Graph()
    run = bound.placeholder("run")
    arguments = bound.placeholder("arguments")
    search = bound.call_function(NanSearch) if here.searches_for_nan else None
    copies: dict[fx.Node, fx.Node] = {}
    last = {number: name for name, number in operators.items()}
    nbytes_of = Counter()  # what operators compute in the CPU's memory
    for node in module.graph.nodes:
        if node.name in operators:
            nbytes_of[operators[node.name]] += _computed_nbytes(node)
    begun: set[int] = set()
    kept: dict[int, fx.Node] = {}  # by their positions among the results
    in_place: fx.Node | None = None  # the values of tiles that are where the graph computes
    copied: dict[int, fx.Node] = {}  # gradients to be copied, by their tiles
    nbytes = 0  # of these
    in_prologue = True
    for node in module.graph.nodes:
        number = operators.get(node.name, PROLOGUE)
        event: Event | None = node.meta.get(ops.EVENT)
        if in_prologue and max(number, PROLOGUE if event is None else event.operator) != PROLOGUE:
            in_prologue = False
            bound.call_method("leave_prologue", (run,))
        if number != PROLOGUE and number not in begun:
            begun.add(number)
            bound.call_method("begin_operator", (run, number))
        if node.op == "placeholder":
            copies[node] = bound.call_method("pop", (arguments,))
            copies[node].name = node.name
        elif node.target in ops.KINDS:
            assert event is not None
            tile = tiles[event.tile]
            alone = tile.ranks * tile.replicas == 1
            if here.searches_for_nan and event.kind == "reduce_scatter":
                names = tuple(member.name for member in tile.members) or (tile.label,)
                bound.call_method("check", (search, names, copies[node.args[1]]))
            if event.kind == "reduce_scatter" and (alone or event.tile in here.gradients):
                copies[node] = copies[node.args[1]]
                continue
            if event.kind == "allgather" and alone:
                continue
            if event.tile in here.kept and event.kind == "offload":
                kept[gradients[event.tile]] = copies[node.args[1]]
                continue
            if event.tile in here.gradients and event.kind == "offload":
                size = node.args[1].meta["val"].nbytes
                if copied and (event.tile in copied or nbytes + size > _COPIED_TOGETHER):
                    bound.call_method("copy_gradients", (run, tuple(copied), tuple(copied.values())))
                    copied, nbytes = {}, 0
                copied[event.tile] = copies[node.args[1]]
                nbytes += size
                continue
            if event.tile in here.tiles and event.kind == "wait":
                in_place = in_place or bound.call_function(getattr, (run, "values"))
                value = bound.call_function(operator.getitem, (in_place, event.tile))
                copies[node] = value if tile.members else bound.call_function(operator.getitem, (value, 0))
                continue
            method = _METHODS_IN_PLACE.get(event.kind, event.kind) if event.tile in here.tiles else method_of(event)
            if method is None or (method == "passed" and not here.followed):
                continue
            values = node.args[1:] if node.target in _TAKE_A_VALUE else ()
            values = node.args if node.target is ops.offload_activation else values
            values = fx.map_arg(values, copies.__getitem__)
            options: dict[str, Any] = {} if event.offset is None else {"offset": event.offset}
            copies[node] = bound.call_method(method, (run, event.tile, *values), options)
            if event.kind == "wait" and not tile.members:
                copies[node] = bound.call_function(operator.getitem, (copies[node], 0))
        elif node.target is ops.pack:
            continue  # which the run knows by its tile
        elif node.target is ops.member:
            copies[node] = bound.call_function(operator.getitem, (copies[node.args[0]], node.kwargs["number"]))
        elif node.target is ops.together:
            copies[node] = fx.map_arg(node.args[0], copies.__getitem__)
        elif node.target is ops.dequantize:
            copies[node] = bound.call_function(dequantize, fx.map_arg(node.args, copies.__getitem__))
        elif node.name in regions:  # which gets the only reference to a value that nothing else needs
            inputs = bound.call_function(_listed, fx.map_arg(node.args, copies.__getitem__))
            copies[node] = bound.call_function(regions[node.name], (inputs,))
        elif node.op == "output":
            if copied:
                bound.call_method("copy_gradients", (run, tuple(copied), tuple(copied.values())))
            results = fx.map_arg(node.args[0], copies.__getitem__)
            bound.output(tuple(kept.get(position, result) for position, result in enumerate(results)))
        else:
            copies[node] = bound.node_copy(node, copies.__getitem__)
            if type(node.target) is torch._ops.OpOverload:
                copies[node].target = _called_directly(node.target)
        if here.searches_for_nan and number != PROLOGUE and node in copies:
            bound.call_method("note", (search, where_computed(node, number), copies[node]))
        if last.get(number) == node.name:
            bound.call_method("end_operator", (run, nbytes_of[number]))
    return fx.GraphModule(module, bound, class_name=f"Planned{module.__class__.__name__}")


def _computed_nbytes(node: fx.Node) -> int:
    """Return the bytes of a result in memory of its own on the CPU, with the sizes at hand where they are symbolic. A
    tuple has none, as its members count."""
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(result.alias_info is not None for result in schema.returns)
    value = node.meta.get("val")
    if is_view or not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return 0
    nbytes = value.numel() * value.dtype.itemsize
    return nbytes if isinstance(nbytes, int) else int(nbytes.node.hint or 0)


@cache
def _called_directly(operation: torch._ops.OpOverload) -> Callable[..., object]:
    """What does an operation without any Python in between. FX would write `torch.ops.aten.mm.default(...)`: to find
    that, and to get from `OpOverload.__call__` to PyTorch's own code, takes longer than small operations do."""
    call: Any = partial(operation._op)
    call.__name__, call.__module__ = operation.__name__, operation.namespace  # by which FX names it
    return call


def _listed(*values: object) -> list[object]:
    return list(values)


def method_of(event: Event) -> str:
    """The method of `Run` that does what an event means."""
    if event.for_backward:
        return f"{event.kind}_for_backward"
    return "keep" if event.kind == "release" and event.resident else event.kind


def prologue_fetches(schedule: GraphSchedule) -> list[tuple[int, int | None]]:
    """The tiles of parameters that a graph fetches in its prologue, and the offsets of their buffers."""
    fetches = schedule.at(PROLOGUE, "fetch")
    return [(event.tile, event.offset) for event in fetches if not schedule.tiles[event.tile].activation]
