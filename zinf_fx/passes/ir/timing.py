"""How long the operators of planned graphs compute on the device that they are for: each is run by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from zinf_fx import ops
from zinf_fx.errors import PlanError
from zinf_fx.passes.ir.framework import computing, size_at_hand

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
        """Of some nodes in a row, as one program. Raises: PlanError."""
        module, inputs = _extracted(nodes, regions)
        key = (module.code, *map(_described, inputs), *(regions.get(node.name) for node in nodes))
        if key not in self._known:
            try:
                self._known[key] = _measured(module, inputs)
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
    inputs = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside))
    graph, new = fx.Graph(), {}
    for number, node in enumerate(inputs):
        new[node] = graph.placeholder(f"input_{number}")
    for number, node in enumerate(nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
        target = _RUN_AS.get(node.target, node.target)
        if (region := regions.get(node.name)) is not None:
            target, args = region, (list(args),)
        new[node] = graph.create_node(node.op, target, args, kwargs, name=f"value_{number}")
    graph.output(tuple(new[node] for node in nodes if not inside.issuperset(node.users)))
    return fx.GraphModule(nodes[0].graph.owning_module or {}, graph), inputs


def _nothing(*given: object) -> torch.Tensor:
    return torch.empty(0)


# A member of a pack costs as much as an index. What is timed draws from whatever state the generator has.
_RUN_AS = {ops.member: ops.part_of_pack, **dict.fromkeys(ops.NOT_COMPUTED, _nothing)}


def _measured(module: fx.GraphModule, inputs: Sequence[fx.Node]) -> float:
    values = [node.meta["val"] for node in inputs]
    tensors = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
    devices = {one.device for one in tensors}
    # A weight comes from memory each time, so the calls take turns on as many inputs as the caches don't hold.
    turns = min(_TURNS, 1 + _CACHES // max(sum(one.untyped_storage().nbytes() for one in tensors), 1))
    made_up = [tree_map(_made_up, values) for _ in range(turns)]
    seconds: list[float] = []
    with torch.no_grad():
        module(*made_up[0])  # kernels are chosen once
        started = time.perf_counter()
        while len(seconds) < _TIMES or time.perf_counter() - started < _SECONDS:
            _synchronize(devices)
            before = time.perf_counter()
            module(*made_up[(1 + len(seconds)) % turns])
            _synchronize(devices)
            seconds.append(time.perf_counter() - before)
    return mean(seconds)


def _made_up(value: Any) -> Any:
    """Something like a value of a node's result. Indices are 0, which every table has."""
    if isinstance(value, torch.SymInt):
        return size_at_hand(value)
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = ([int(one) for one in each] for each in (value.shape, value.stride()))
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if value.numel() else 0
    flat = torch.zeros(extent, dtype=value.dtype, device=value.device)  # of an expanded tensor, each element once
    if value.dtype in _NORMAL:
        flat.normal_()
    return flat.as_strided(sizes, strides)


def _described(node: fx.Node) -> str:
    return ", ".join(
        f"{one.dtype} {tuple(one.shape)} {one.stride()} {one.device}" if isinstance(one, torch.Tensor) else str(one)
        for one in tree_leaves(node.meta["val"])
    )


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
