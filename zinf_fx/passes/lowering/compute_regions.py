"""Puts together what each operator computes, for a compiler: the schedule of events stays as it is."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.aliases import is_view_node
from zinf_fx.passes.ir.framework import (
    OPERATOR,
    GraphContext,
    Pass,
    event_of,
    events_in,
    is_compute,
    operand,
    operator_of,
)
from zinf_fx.passes.ir.in_flight import outline
from zinf_fx.passes.ir.randomness import is_random
from zinf_fx.plan.lifetimes import Lifetimes
from zinf_fx.plan.schedule import PROLOGUE

_Place = Literal["inside", "before", "between", "after", "apart"]
# PyTorch's own kernel is as good for one operation by itself.
_FEWEST = 2
# What only names values that are there, or lie together.
_NAMING = (ops.member, ops.together, ops.pack)
# Views of a part of a tensor.
_PARTS = {"slice", "select", "split", "split_with_sizes", "unbind", "diagonal", "unfold", "as_strided"}
# What adds to elements that indices name, or sets them. Several indices may name one element: Inductor's code comes to
# it in the order of its threads, so that results differ from run to run.
_WRITING_BY_INDEX = (
    torch.ops.aten._unsafe_index_put,
    torch.ops.aten._unsafe_masked_index_put_accumulate,
    torch.ops.aten.col2im,
    torch.ops.aten.embedding_dense_backward,
    torch.ops.aten.index_add,
    torch.ops.aten.index_put,
    torch.ops.aten.index_reduce,
    torch.ops.aten.unfold_backward,
)
_NOT_BY_SHAPE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, eq=False)
class Region:
    """What a node of a lowered graph computes: a graph of PyTorch's operations alone, without effects, whose results
    are tensors that share memory neither with its inputs nor with each other.

    Attributes:
        module: its inputs, operations and results have names by their order, so that equal layers have equal graphs.
        text: the same for regions that compute the same of values of the same types.
    """

    module: fx.GraphModule
    text: str

    __name__ = "region"  # which FX asks of whatever is the target of a node

    def __call__(self, *inputs: object) -> tuple[torch.Tensor, ...]:
        return self.module(*inputs)


class FormRegions(Pass):
    """Replace each run of operations of an operator by one node, whose target is a `Region`.

    A run ends where another matrix of the model is needed, so that layers in one pack have equal regions, too, and
    where an event is due that moves bytes or frees them: what has to be there is waited for at the same place as
    before, and nothing stays longer. Events that do neither, because a tile stays where it is or because there is one
    rank, move to the beginning or the end of the run. So do views: a region makes of its inputs the views that it
    takes, unless they are parts, and what others take of its results is made after it. No result of a region is a
    view, then, and none shares memory with a tile. An operation stays by itself when it draws random numbers, writes to
    its input, writes by index, has results of sizes that only values tell, or isn't one of PyTorch's.
    """

    name = "compute_regions"
    requires = ("lowered",)

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        forming = _Forming(graph, _places(graph, context))
        forming.arrange()
        return context


def _places(graph: fx.Graph, context: GraphContext) -> Callable[[fx.Node], _Place]:
    """Where a node may be, seen from a run that goes on over it: inside of it, before it, before it or after it
    depending on what it takes, or after it; "apart" ends the run."""
    lifetimes = Lifetimes([outline(graph, context)])
    live_ranges = {node: lifetimes.live_range_of(0, number) for number, node in enumerate(events_in(graph))}

    def of_event(node: fx.Node) -> _Place:
        event, tile = event_of(node), context.tile_of(node)
        if event.kind in ("reduce_scatter", "offload"):
            is_there = tile.gradient_tier == "device" or event.kind == "reduce_scatter"
            return "after" if tile.ranks * tile.replicas == 1 and is_there else "apart"
        if event.kind in ("offload_activation", "write"):
            return "apart"
        live_range = live_ranges[node]
        is_kept = live_range is not None and live_range.kept
        was_kept = live_range is not None and live_range.found == "kept"
        if event.kind == "release":
            return "after" if is_kept or not tile.needs_buffer else "apart"
        there = not tile.needs_buffer or (event.kind == "wait" and was_kept)
        return "before" if there else "apart"

    def place(node: fx.Node) -> _Place:
        if ops.EVENT in node.meta:
            return of_event(node)
        if node.op == "output" or operator_of(node) == PROLOGUE:
            return "apart"
        if not is_compute(node) or node.target in _NAMING or not _are_tensors(node.meta.get("val")):
            is_size = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
            return "between" if node.op == "get_attr" or node.target in _NAMING or is_size else "apart"
        if is_view_node(node):
            return "between"
        return "inside" if _is_functional(node) else "apart"

    return place


def _is_functional(node: fx.Node) -> bool:
    """Whether a node's results depend on its inputs' values and nothing else, compiled too, and have sizes that types
    tell."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if target._schema.is_mutable or is_random(node) or any(tag in target.tags for tag in _NOT_BY_SHAPE):
        return False
    if target.overloadpacket in _WRITING_BY_INDEX:
        return False
    if not isinstance(node.meta["val"], torch.Tensor) and any(not _is_tensor_member(user) for user in node.users):
        return False
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    return all(value is not None and _is_plain(x) for value in (*inputs, node.meta["val"]) for x in _leaves(value))


def _is_tensor_member(user: fx.Node) -> bool:
    return user.target is operator.getitem and isinstance(user.meta.get("val"), torch.Tensor)


def _is_plain(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride()) if value.layout is torch.strided else None
        return sizes is not None and value.device.type != "meta" and all(_symbols(size)[1] for size in sizes)
    return value is None or (isinstance(value, (torch.SymInt, int)) and _symbols(value)[1])


def _symbols(size: object) -> tuple[frozenset[Any], bool]:
    """The symbols in a size, and whether all of them stand for sizes of inputs."""
    if not isinstance(size, torch.SymInt):
        return frozenset(), True
    symbols = frozenset(size.node.expr.free_symbols)
    return symbols, size.node.has_hint()


def _are_tensors(value: object) -> bool:
    """Whether a node's value is a tensor, or a tuple of tensors, some of which may be None."""
    members = value if isinstance(value, (tuple, list)) else [value]
    tensors = [isinstance(member, torch.Tensor) for member in members if member is not None]
    return bool(tensors) and all(tensors)


def _leaves(value: object) -> list[object]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


@dataclass
class _Run:
    """Operations in a row, and what waits for the end of the run."""

    operator: int
    inside: dict[fx.Node, None] = field(default_factory=dict)
    after: dict[fx.Node, None] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)  # both, in the graph's order
    matrices: set[fx.Node] = field(default_factory=set)  # that are taken inside

    def add(self, node: fx.Node, inside: bool) -> None:
        (self.inside if inside else self.after)[node] = None
        self.nodes.append(node)

    @property
    def operations(self) -> int:
        return sum(node.target is not operator.getitem for node in self.inside)


class _Forming:
    """Goes through a graph once, and puts its nodes into the order in which they will be."""

    def __init__(self, graph: fx.Graph, place: Callable[[fx.Node], _Place]) -> None:
        self._graph, self._place = graph, place
        self._order: list[fx.Node] = []
        self._run: _Run | None = None
        self._members: set[fx.Node] = set()  # of tuples that operations inside of runs return
        self._replaced: set[fx.Node] = set()
        self._nodes = list(graph.nodes)

    def _take(self, node: fx.Node) -> None:
        if node in self._members:
            return
        place = self._place(node)
        run = self._run
        if run is not None and (place == "apart" or operator_of(node) != run.operator):
            self._end()
        if place == "inside":
            if self._run is not None:
                taken = list(_taken_by(node, self._run.inside))
                if any(source in self._run.after for source in taken) or not _matrices(taken) <= self._run.matrices:
                    self._end()
            self._run = self._run or _Run(operator_of(node))
            self._run.matrices |= _matrices(_taken_by(node, self._run.inside))
            self._run.add(node, inside=True)
            if not isinstance(node.meta["val"], torch.Tensor):
                for member in (user for user in node.users if user.target is operator.getitem):
                    self._members.add(member)
                    self._run.add(member, inside=True)
        elif (run := self._run) is not None and (
            place == "after" or any(n in run.inside or n in run.after for n in node.all_input_nodes)
        ):
            run.add(node, inside=False)
        else:
            self._order.append(node)

    def _end(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        if run.operations < _FEWEST:
            self._order += run.nodes
            return
        inside = set(run.inside)
        results = [node for node in run.inside if _is_result(node, inside)]
        region, inputs = _region(run.inside, results, self._graph)
        with self._graph.inserting_before(self._graph.output_node()):
            call = self._graph.call_function(region, tuple(inputs))
            call.meta = {"val": tuple(node.meta["val"] for node in results), OPERATOR: run.operator}
            self._order.append(call)
            for number, node in enumerate(results):
                member = self._graph.call_function(operator.getitem, (call, number))
                member.meta = {**node.meta, OPERATOR: run.operator}
                node.replace_all_uses_with(member, delete_user_cb=lambda user: user not in inside)
                self._order.append(member)
        self._replaced |= inside
        self._order += run.after

    def arrange(self) -> None:
        """Put the graph into its order, and remove what regions have taken over."""
        for node in self._nodes:
            self._take(node)
        previous = self._order[0]
        for node in self._order[1:]:
            previous.append(node)
            previous = node
        for node in reversed(self._nodes):
            if node in self._replaced or (_is_view(node) and not node.users):
                self._graph.erase_node(node)


def _is_result(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether somebody else than the operations of a region takes a value that is computed in it, or views of it."""
    if not isinstance(node.meta["val"], torch.Tensor):
        return False
    return any(_is_taken(user, inside) for user in node.users)


def _is_taken(user: fx.Node, inside: set[fx.Node]) -> bool:
    if user in inside:
        return False
    return not _is_view(user) or any(_is_taken(view_user, inside) for view_user in user.users)


def _is_view(node: fx.Node) -> bool:
    """Whether a node makes a view, or is one of several views that another makes."""
    if node.target is operator.getitem:
        return not isinstance(operand(node).meta.get("val"), torch.Tensor) and _is_view(operand(node))
    is_ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return is_ours and is_view_node(node)


def _is_remade(view: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether the region of these operations makes a view by itself. A part of what it takes is made before, so that
    regions that compute with different parts are equal."""
    if not _is_view(view):
        return False
    is_part = view.target is operator.getitem or getattr(view.target, "_opname", None) in _PARTS
    return not is_part or any(source in inside or _is_view_of(source, inside) for source in view.all_input_nodes)


def _is_view_of(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether a node is a view of what one of these operations computes."""
    return _is_view(node) and any(source in inside or _is_view_of(source, inside) for source in node.all_input_nodes)


def _taken_by(node: fx.Node, inside: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What an operation takes, or takes views of that its region makes."""
    for source in node.all_input_nodes:
        if _is_remade(source, inside):
            yield from _taken_by(source, inside)
        else:
            yield source


def _matrices(taken: Iterable[fx.Node]) -> set[fx.Node]:
    """The matrices of the model among what is taken."""
    return {node for node in taken if node.target in (ops.wait, ops.member) and node.meta["val"].dim() > 1}


def _region(inside: dict[fx.Node, None], results: list[fx.Node], outer: fx.Graph) -> tuple[Region, list[fx.Node]]:
    """The region of these operations, and what it takes."""
    graph, copies, inputs = fx.Graph(), {}, []
    counts = {"input": 0, "value": 0}
    last_input: fx.Node | None = None

    def named(kind: str) -> str:
        counts[kind] += 1
        return f"{kind}_{counts[kind] - 1}"

    def take(node: fx.Node) -> fx.Node:
        nonlocal last_input
        if node not in copies:
            if node in inside or _is_remade(node, inside):
                copies[node] = copy(node)
            else:
                with graph.inserting_before() if last_input is None else graph.inserting_after(last_input):
                    copies[node] = last_input = graph.placeholder(named("input"))
                last_input.meta = {"val": node.meta["val"]}
                inputs.append(node)
        return copies[node]

    def copy(node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), take)
        made = graph.create_node(node.op, node.target, args, kwargs, named("value"))
        made.meta = {"val": node.meta["val"]}
        return made

    for node in inside:
        copies[node] = copy(node)
    for size in _unbound_sizes(graph, outer):
        take(size)
    graph.output(tuple(copies[node] for node in results)).meta = {"val": tuple(n.meta["val"] for n in results)}
    return Region(fx.GraphModule({}, graph), _text(graph)), inputs


def _unbound_sizes(graph: fx.Graph, outer: fx.Graph) -> list[fx.Node]:
    """Inputs of the outer graph that say what the symbols are that the sizes in a region consist of, and that none of
    its own inputs says."""
    needed: dict[Any, None] = {}
    bound: set[Any] = set()
    for node in graph.nodes:
        for value in _leaves(node.meta["val"]):
            sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
            for size in sizes:
                symbols, _ = _symbols(size)
                needed.update(dict.fromkeys(sorted(symbols, key=str)))
                if node.op == "placeholder" and isinstance(size, torch.SymInt) and size.node.expr in symbols:
                    bound |= symbols
    missing = set(needed) - bound
    if not missing:
        return []
    sizes = (n for n in outer.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.SymInt))
    return [node for node in sizes if node.meta["val"].node.expr in missing]


def _text(graph: fx.Graph) -> str:
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {_type(node.meta['val'])}")
        else:
            lines.append(f"{node.name} = {node.target}({node.args}, {node.kwargs})")
    return "\n".join(lines)


def _type(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
