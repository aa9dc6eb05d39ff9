"""How long the operators of planned graphs compute on the device that they are for: each is run by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from statistics import mean
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import Target
from torch.utils._pytree import tree_leaves, tree_map

from zinf_fx import cuda, ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.ir.aliases import is_view_node
from zinf_fx.passes.ir.framework import arguments_of, computing, size_at_hand

# An operator is run for so many seconds and at least so often. The mean counts: what now and then interrupts it here
# does so in a step, too.
_SECONDS, _TIMES = 0.2, 3
# Bytes that caches may hold, and inputs at most that take turns.
_CACHES, _TURNS = 64 << 20, 8
_NORMAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Regions = Mapping[str, Callable[[list], Any]]
"""By the names of nodes that stand for regions, what computes them, from a list of what they take."""

_NONE: Regions = MappingProxyType({})


class OperatorTimer:
    """Runs operators on made-up values of their inputs' shapes, strides and dtypes; equal operators once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, float] = {}

    def operators(self, graph: fx.Graph, regions: Regions = _NONE) -> dict[int, float]:
        """Seconds of every operator of a planned graph. Raises: PlanError for one that can't be run by itself."""
        return {number: self.seconds(nodes, regions) for number, nodes in computing(graph).items()}

    def seconds(self, nodes: Sequence[fx.Node], regions: Regions = _NONE) -> float:
        """Return the seconds of some nodes in a row, as one program. Raises: PlanError."""
        module, inputs = _extracted(nodes, regions)
        uses = [_Uses(node, set(nodes)) for node in inputs]
        key = (module.code, *map(_described, inputs), *(regions.get(node.name) for node in nodes))
        if key not in self._known:
            try:
                self._known[key] = _measured(module, inputs, uses)
            except Exception as error:
                raise PlanError(
                    f"the operator of '{nodes[0]}' to '{nodes[-1]}' can't be timed by itself: "
                    f"{type(error).__name__}: {error}. Simulate a plan file instead, whose operators take the time of "
                    "their arithmetic and bytes"
                ) from error
        return self._known[key]


def _extracted(nodes: Sequence[fx.Node], regions: Regions) -> tuple[fx.GraphModule, list[fx.Node]]:
    """A program of these nodes, which returns what others use, and the nodes that are its inputs."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside))
    graph, new = fx.Graph(), {}
    for number, node in enumerate(inputs):
        new[node] = graph.placeholder(f"input_{number}")
    for number, node in enumerate(nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
        target = _RUN_AS.get(node.target, node.target)
        if target in _EMPTY and not node.meta["val"].is_floating_point():
            target = _EMPTY[target]
        if (region := regions.get(node.name)) is not None:
            target, args = region, (list(args),)
        new[node] = graph.create_node(node.op, target, args, kwargs, name=f"value_{number}")
    graph.output(tuple(new[node] for node in nodes if not inside.issuperset(node.users)))
    return fx.GraphModule(nodes[0].graph.owning_module or {}, graph), inputs


def _nothing(*given: object) -> torch.Tensor:
    return torch.empty(0)


# A member of a pack costs as much as an index. What is timed draws from whatever state the generator has.
_RUN_AS: dict[Target, Target] = {ops.member: ops.part_of_pack, **dict.fromkeys(ops.NOT_COMPUTED, _nothing)}


def _zeroed(target: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """An operator that fills what it makes, which may be used as an index where nothing else is written."""

    def zeroed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return target(*args, **kwargs).zero_()

    zeroed.__name__ = f"zeroed_{target._opname}"
    return zeroed


_aten = torch.ops.aten
_EMPTY: dict[Target, Target] = {
    target: _zeroed(target)
    for target in (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
}

# Operators that index, by where they have the dimension of it; those with products in groups; and copies.
_BY_ARGUMENT = ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy")
_BY_POSITION = ("index", "index_put", "_unsafe_index", "_unsafe_index_put")
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward")
_COPIES = ("_to_copy", "clone", "alias", "detach")


class _Uses:
    """What the operators `inside` a program use an input's integers as: indices below `below`, or the ends of groups
    of `rows`; None: nothing of the kind."""

    def __init__(self, node: fx.Node, inside: set[fx.Node] | None) -> None:
        self.below: int | None = None
        self.rows: int | None = None
        self._find(node, inside)

    def values(self, count: int) -> torch.Tensor:
        """So many of them; where nothing is known, 0, which every table has."""
        if self.rows is not None:
            return torch.arange(1, count + 1, device="cpu") * self.rows // max(count, 1)
        return torch.arange(count, device="cpu") % (self.below or 1)

    def _find(self, node: fx.Node, inside: set[fx.Node] | None) -> None:
        for user in node.users:
            if inside is not None and user not in inside:
                continue
            name, args = getattr(user.target, "_opname", ""), user.args
            region = getattr(user.target, "module", None)
            if isinstance(region, fx.GraphModule):
                placeholders = region.graph.find_nodes(op="placeholder")
                for placeholder in (inner for inner, given in zip(placeholders, args, strict=False) if given is node):
                    self._find(placeholder, None)
            elif is_view_node(user) or name in _COPIES:
                self._find(user, inside)
            elif name in _GROUPED and any(node is argument for argument in (*args[2:3], user.kwargs.get("offs"))):
                self.rows = _size(args[0], -1 if len(_shape(args[0])) == len(_shape(args[1])) else -2)
            elif name == "embedding" and args[1] is node:
                self._index(args[0], 0)
            elif name in _BY_ARGUMENT and args[2] is node:
                self._index(*arguments_of(user)[:2])
            elif name in _BY_POSITION:
                for dim in (dim for dim, size in enumerate(arguments_of(user)[1]) if size is node):
                    self._index(args[0], dim)

    def _index(self, table: object, dim: int) -> None:
        if size := _size(table, dim):
            self.below = size if self.below is None else min(self.below, size)


def _shape(node: object) -> Sequence[int | torch.SymInt]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, torch.Tensor) else ()


def _size(node: object, dim: int) -> int | None:
    shape = _shape(node)
    return size_at_hand(shape[dim]) if -len(shape) <= dim < len(shape) else None


def _measured(module: fx.GraphModule, inputs: Sequence[fx.Node], uses: Sequence[_Uses]) -> float:
    values = [node.meta["val"] for node in inputs]
    tensors = [tensor for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor)]
    devices = {tensor.device for tensor in tensors}
    # A weight comes from memory each time, so the calls take turns on as many inputs as the caches don't hold.
    turns = min(_TURNS, 1 + _CACHES // max(sum(tensor.untyped_storage().nbytes() for tensor in tensors), 1))
    pairs = [*zip(values, uses, strict=True)]
    made_up = [[tree_map(partial(_made_up, use=use), value) for value, use in pairs] for _ in range(turns)]
    seconds: list[float] = []
    with torch.no_grad():
        module(*made_up[0])  # kernels are chosen once
        started = time.perf_counter()
        while len(seconds) < _TIMES or time.perf_counter() - started < _SECONDS:
            for device in devices:
                cuda.synchronize(device)
            before = time.perf_counter()
            module(*made_up[(1 + len(seconds)) % turns])
            for device in devices:
                cuda.synchronize(device)
            seconds.append(time.perf_counter() - before)
    return mean(seconds)


def _made_up(value: Any, use: _Uses) -> Any:
    """Something like a value of a node's result."""
    if isinstance(value, torch.SymInt):
        return size_at_hand(value)
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = ([int(size) for size in sizes_or_strides] for sizes_or_strides in (value.shape, value.stride()))
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if value.numel() else 0
    flat = torch.zeros(extent, dtype=value.dtype, device=value.device)  # of an expanded tensor, each element once
    if value.dtype in _NORMAL:
        flat.normal_()
    elif value.dtype in (torch.int32, torch.int64):
        flat += use.values(extent).to(flat)
    return flat.as_strided(sizes, strides)


def _described(node: fx.Node) -> str:
    return ", ".join(
        f"{leaf.dtype} {tuple(leaf.shape)} {leaf.stride()} {leaf.device}"
        if isinstance(leaf, torch.Tensor)
        else str(leaf)
        for leaf in tree_leaves(node.meta["val"])
    )
