"""How long the operators of planned graphs compute on the device that they are for: each node is run by itself."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch import fx

from zinf_fx.errors import PlanError
from zinf_fx.passes.framework import is_compute, operator_of

# A node is run for so many seconds and at least so often; the median counts.
_SECONDS, _TIMES = 0.05, 3
# Bytes that caches may hold, and inputs at most that take turns.
_CACHES, _TURNS = 64 << 20, 8
_NORMAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class NodeTimer:
    """Measures nodes on made-up values of their inputs' shapes, strides and dtypes; equal nodes once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, str], float] = {}

    def operators(self, graph: fx.Graph) -> dict[int, float]:
        """Seconds of every operator of a planned graph. Raises: PlanError for a node that can't be run by itself."""
        found: Counter[int] = Counter()
        for node in graph.nodes:
            if is_compute(node) and node.target is not operator.getitem:
                found[operator_of(node)] += self.seconds(node)
        return dict(found)

    def seconds(self, node: fx.Node) -> float:
        """Of one node. Raises: PlanError."""
        key = (node.target, str(fx.map_arg((node.args, node.kwargs), _described)))
        if key not in self._known:
            try:
                self._known[key] = _measured(node)
            except Exception as error:
                raise PlanError(
                    f"'{node}' ({node.target}) can't be timed by itself: {type(error).__name__}: {error}. Simulate a "
                    "plan file instead, whose operators take the time of their arithmetic and bytes"
                ) from error
        return self._known[key]


def _measured(node: fx.Node) -> float:
    inputs = _tensors(n.meta["val"] for n in node.all_input_nodes)
    devices = {one.device for one in [*inputs, *_tensors([node.meta.get("val")])]}
    # A weight comes from memory each time, so the calls take turns on as many inputs as the caches don't hold.
    turns = min(_TURNS, 1 + _CACHES // max(sum(one.untyped_storage().nbytes() for one in inputs), 1))
    calls = [_call(node) for _ in range(turns)]
    seconds: list[float] = []
    with torch.no_grad():
        calls[0]()  # kernels are chosen once
        started = time.perf_counter()
        while len(seconds) < _TIMES or time.perf_counter() - started < _SECONDS:
            _synchronize(devices)
            before = time.perf_counter()
            calls[(1 + len(seconds)) % turns]()
            _synchronize(devices)
            seconds.append(time.perf_counter() - before)
    return median(seconds)


def _call(node: fx.Node) -> Callable[[], object]:
    """What a node does, on values of its own."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _made_up(n.meta["val"]))
    if node.op == "call_method":
        return lambda: getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return lambda: node.target(*args, **kwargs)  # type: ignore[operator]


def _made_up(value: Any) -> Any:
    """Something like what a node's result will be. Indices are 0, which every table has."""
    if isinstance(value, (tuple, list)):
        return type(value)(_made_up(one) for one in value)
    if isinstance(value, torch.SymInt):
        return int(value.node.hint)
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
        for one in _flat(node.meta["val"])
    )


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [one for value in values for one in _flat(value) if isinstance(one, torch.Tensor)]


def _flat(value: Any) -> list[Any]:
    return [one for each in value for one in _flat(each)] if isinstance(value, (tuple, list)) else [value]


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
