"""Dynamo's graph of a whole batch -> that of one micro-batch, which takes and gives the batch. See
[Note: micro-batches]."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.errors import ConfigError
from zinf_fx.frontend.graph_inputs import GraphInput
from zinf_fx.passes.ir.framework import size_at_hand
from zinf_fx.passes.ir.rewriting import copied_module

log = logging.getLogger("zinf_fx")


def batch_size(module: fx.GraphModule, inputs: Sequence[GraphInput], config: Config) -> int | None:
    """The size of the batch that `config.micro_batches` divides; None: nothing is divided, as without gradients.

    The batch is what the first dimension of the call's tensors has.

    Raises: ConfigError where sizes that depend on the batch can't be told from others, or it can't be divided.
    """
    if not _is_divided(inputs, config):
        return None
    return _batch_of(module.graph.find_nodes(op="placeholder"), inputs, config, config.micro_batches).size


def mark_batch(arguments: Sequence[Any]) -> None:
    """Have Dynamo, which leaves all sizes open, tell the batch's from others that are equal by chance: it takes equal
    sizes of the first call for one. `arguments`: of that call."""
    tensors = [tensor for tensor in tree_leaves(arguments) if isinstance(tensor, torch.Tensor) and tensor.dim()]
    if len({len(tensor) for tensor in tensors}) == 1:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def hold_sizes(inputs: Sequence[Any]) -> None:
    """Have Dynamo make another graph for other sizes than those of this call."""
    for size in inputs:
        if isinstance(size, torch.SymInt):
            int(size)  # which makes a guard of it


def of_one_micro_batch(
    captured: fx.GraphModule, inputs: Sequence[GraphInput], config: Config, count: int
) -> tuple[fx.GraphModule, list[GraphInput]]:
    """A module that computes one of `count` micro-batches of what is captured, and its inputs, of which all sizes are
    those of this call, also where "auto" makes one of the whole batch. Where `config` divides nothing, what was given.

    Raises: ConfigError as `batch_size`, and where what is computed can't be divided.
    """
    if not _is_divided(inputs, config):
        return captured, list(inputs)
    module = _copy_of(captured)
    placeholders = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    sizes = {node: size_at_hand(_value(node)) for node in placeholders if isinstance(_value(node), torch.SymInt)}
    if count > 1:
        batch = _batch_of(placeholders, inputs, config, count)
        sizes = {node: batch.micro_size(node) for node in sizes}
        _divide(module.graph, batch, dict(zip(placeholders, inputs, strict=True)))
    for node in sizes:
        for user in set(node.users) - {output}:
            user.args, user.kwargs = fx.map_arg(
                (user.args, user.kwargs), lambda argument: sizes.get(argument, argument)
            )
    return module, [_fixed(node, graph_input) for node, graph_input in zip(placeholders, inputs, strict=True)]


def _divide(graph: fx.Graph, batch: _Batch, inputs: Mapping[fx.Node, GraphInput]) -> None:
    """Have the graph take a part of each of the batch's `inputs`, by placeholder, and put its results together. Raises:
    ConfigError where what it computes can't be divided."""
    *_, last = inputs
    (output,) = graph.find_nodes(op="output")
    _check_values(graph, inputs, batch)
    joins = {node: batch.joined_by(node) for node in output.all_input_nodes if node not in inputs}
    dims = {node: batch.dim_of(node, f"input '{graph_input.name}'") for node, graph_input in inputs.items()}
    with graph.inserting_after(last):
        for node, dim in dims.items():
            if dim is not None:
                part = graph.call_function(ops.micro_batch, (node, dim, batch.count))
                node.replace_all_uses_with(part, delete_user_cb=lambda user, part=part: user is not part)
    with graph.inserting_before(output):
        joined = {node: graph.call_function(ops.join, (node, *how)) for node, how in joins.items() if how}
    output.args = fx.map_arg(output.args, lambda node: joined.get(node, node))


def _copy_of(captured: fx.GraphModule) -> fx.GraphModule:
    """A module of Dynamo's with a graph of its own, whose inputs are known as those of the other's are."""
    module = copied_module(captured)
    module.meta = captured.meta
    both = (graph_module.graph.find_nodes(op="placeholder") for graph_module in (captured, module))
    for node, copy in zip(*both, strict=True):
        if (source := getattr(node, "_dynamo_source", None)) is not None:
            copy._dynamo_source = source
    return module


@dataclass(frozen=True)
class _Batch:
    """How sizes of the captured graph depend on the batch.

    Attributes:
        symbol: the size of the batch, in Dynamo's sizes; 0 for one sample, on which no size depends.
        size: what it is in this call.
        count: of its micro-batches.
        loss: what losses of micro-batches are made one by, "mean" or "sum".
    """

    symbol: sympy.Basic
    size: int
    count: int | Literal["auto"]
    loss: str

    def dim_of(self, node: fx.Node, what: str) -> int | None:
        """The dimension of a tensor that is the batch's; None: none is. Raises: ConfigError."""
        value = _value(node)
        if not isinstance(value, torch.Tensor):
            return None
        depending = [dim for dim, size in enumerate(value.shape) if self.symbol in _expression(size).free_symbols]
        if not depending:
            return None
        where = f"micro_batches={self.count}: {what} is of shape {list(map(size_at_hand, value.shape))}, of which"
        if len(depending) > 1:
            raise ConfigError(
                f"{where} dimensions {depending} depend on the batch size {self.size}, or are equal to it: exactly one "
                "has to be it. Where another size is the same by chance, call torch._dynamo.maybe_mark_dynamic(x, 0) "
                "for each tensor x of the batch, in the place of dynamic=True"
            )
        if _expression(value.shape[depending[0]]) != self.symbol:
            raise ConfigError(
                f"{where} dimension {depending[0]} is made of the batch size {self.size} and something else, so that "
                "it can't be put together of those of micro-batches: give it a dimension of the batch alone, as in "
                "x.view(batch, -1) in the place of x.flatten(0, 1), or the mean or the sum of it"
            )
        if isinstance(value, DTensor):
            raise ConfigError(
                f"{where} dimension {depending[0]} is the batch's, and it is a DTensor: give each rank its part of the "
                "batch as an ordinary tensor, or leave micro_batches out"
            )
        return depending[0]

    def joined_by(self, result: fx.Node) -> tuple[Any, ...] | None:
        """How the caller's result is made of those of the micro-batches; None: they have it alike. Raises:
        ConfigError."""
        value = _value(result)
        if not isinstance(value, torch.Tensor):
            if self.symbol in _expression(value).free_symbols:
                raise ConfigError(
                    f"micro_batches={self.count}: the model returns the number {size_at_hand(value)}, which depends "
                    "on the batch: take it from what the model is called with"
                )
            return None
        dim = self.dim_of(result, f"the model's result '{result}'")
        if dim is not None:
            return ("cat", self.count, dim)
        if value.is_floating_point():
            return (self.loss if value.dim() == 0 else "mean", self.count)
        return ("sum", self.count) if value.dim() == 0 and value.dtype is not torch.bool else None

    def micro_size(self, node: fx.Node) -> int:
        """A size that the graph is called with, of a micro-batch. Raises: ConfigError."""
        size = _value(node)
        expression = _expression(size)
        if self.symbol not in expression.free_symbols:
            return _at_hand(size)
        if expression != self.symbol:
            raise ConfigError(
                f"micro_batches={self.count}: the graph is called with the size {expression} of the batch size "
                f"{self.symbol}, which a graph break makes of it: remove the break (TORCH_LOGS=graph_breaks shows it)"
            )
        assert self.count != "auto"
        return self.size // self.count


def _batch_of(
    placeholders: Sequence[fx.Node], inputs: Sequence[GraphInput], config: Config, count: int | Literal["auto"]
) -> _Batch:
    """What the call's batch is, which is to be divided by `count`. Raises: ConfigError."""
    # What has a size of its own in the first dimension, matrices before vectors.
    batches: list[tuple[fx.Node, GraphInput]] = []
    given = [
        (node, graph_input)
        for node, graph_input in zip(placeholders, inputs, strict=True)
        if graph_input.comes_with_call
    ]
    tensors = [
        (node, graph_input)
        for node, graph_input in given
        if isinstance(_value(node), torch.Tensor) and _value(node).dim()
    ]
    for node, graph_input in sorted(tensors, key=lambda pair: _value(pair[0]).dim() == 1):
        if getattr(graph_input.given, "_dynamo_dynamic_indices", None):
            raise ConfigError(
                f"micro_batches={count}: '{graph_input.name}' was given to torch._dynamo.mark_dynamic, which refuses "
                "a graph for one size of the batch: call maybe_mark_dynamic in its place, or torch.compile(..., "
                "dynamic=True)"
            )
        size = _first(node)
        if not isinstance(_expression(size), sympy.Symbol) or (_value(node).dim() == 1 and batches):
            continue
        # From the second size of the batch on, Dynamo has a symbol for each tensor's: comparing them makes them one.
        if not any(
            size_at_hand(size) == size_at_hand(_first(earlier)) and size == _first(earlier) for earlier, _ in batches
        ):
            batches.append((node, graph_input))
    batches = _of_one_sample(tensors, batches, config) or batches
    if len(batches) > 1:
        shapes = ", ".join(
            f"'{graph_input.name}' {list(map(size_at_hand, _value(node).shape))}" for node, graph_input in batches
        )
        raise ConfigError(
            f"micro_batches={count}: tensors of the call differ in their first dimension ({shapes}), and it can't be "
            "told which is the batch: call torch._dynamo.maybe_mark_dynamic(x, 0) for each tensor x of the batch "
            "before the first step, in the place of dynamic=True"
        )
    for node, graph_input in batches:
        size = _at_hand(_first(node))
        if count != "auto" and size % count:
            raise ConfigError(
                f"micro_batches={count}: the batch is of size {size} ('{graph_input.name}' is of shape "
                f"{list(map(size_at_hand, _value(node).shape))}), which is no multiple of it: leave out the last, "
                "smaller batch (drop_last=True of a DataLoader), or give another number"
            )
        return _Batch(_expression(_first(node)), size, count, config.micro_batch_loss)
    raise ConfigError(
        f"micro_batches={count}: the sizes in the captured graph are fixed, so that it can't be told which of them are "
        "the batch's: compile with torch.compile(model, backend='zinf', dynamic=True, options=...), or, also where "
        "another size (of a feature, say) equals the batch's by chance, call torch._dynamo.maybe_mark_dynamic(x, 0) "
        "for each tensor x of the batch before the first step"
    )


def _of_one_sample(
    tensors: Sequence[tuple[fx.Node, GraphInput]], batches: Sequence[tuple[fx.Node, GraphInput]], config: Config
) -> list[tuple[fx.Node, GraphInput]]:
    """Find one tensor of a batch of one sample, whose size Dynamo never leaves open; none of a larger batch. `batches`:
    what may have a larger one.

    All matrices of the call have it in the first dimension. For "auto", which then leaves the batch whole, some may
    have a later size of these in its place, as masks [length, length] have beside words [1, length], where Dynamo has
    one symbol for both. For a number, several vectors of one size that is no such size are a larger batch.
    """
    auto = config.micro_batches == "auto"
    matrices = [pair for pair in tensors if _value(pair[0]).dim() > 1] or tensors
    samples = [(node, graph_input) for node, graph_input in matrices if size_at_hand(_first(node)) == 1]
    later = {_known(size) for node, _ in samples for size in _value(node).shape[1:]}
    first = {node: _known(_first(node)) for node, _ in tensors}
    sizes = [first[node] for node, _ in matrices if size_at_hand(_first(node)) != 1]
    if not samples or not all(auto and size in later for size in sizes):
        return []
    alike = Counter(first.values())
    if not auto and any(first[node] not in later and alike[first[node]] > 1 for node, _ in batches):
        return []
    for node, graph_input in batches if auto else ():
        log.info(
            "micro_batches=auto: the batch is taken for one sample, as '%s' has one row, in spite of '%s' of shape %s. "
            "If the first dimension of that is the batch, give a number of micro-batches, or call "
            "torch._dynamo.maybe_mark_dynamic(x, 0) for each tensor x of the batch before the first step, in the place "
            "of dynamic=True",
            samples[0][1].name,
            graph_input.name,
            list(map(size_at_hand, _value(node).shape)),
        )
    return samples[:1]


def _check_values(graph: fx.Graph, placeholders: Container[fx.Node], batch: _Batch) -> None:
    """Raises: ConfigError for a model that writes to the batch, or has a value with two dimensions of its size."""
    for node in graph.nodes:
        value = _value(node)
        if not isinstance(value, torch.Tensor):
            continue
        dims = [dim for dim, size in enumerate(value.shape) if _expression(size) == batch.symbol]
        if len(dims) > 1:
            batch.dim_of(node, f"the value '{node}' of the model")
        if dims and node in placeholders and value._version:
            raise ConfigError(
                f"micro_batches={batch.count}: the model writes in place to '{node}', a tensor of the batch, "
                "which would be lost: compute with a copy of it"
            )


def _is_divided(inputs: Sequence[GraphInput], config: Config) -> bool:
    """Whether this is a training step, whose batch `config` divides, or may."""
    trained = any(
        isinstance(graph_input.taken, torch.Tensor) and graph_input.taken.requires_grad for graph_input in inputs
    )
    return config.micro_batches != 1 and torch.is_grad_enabled() and trained


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _first(node: fx.Node) -> int | torch.SymInt:
    """The first dimension of a tensor."""
    return _value(node).shape[0]


def _expression(size: object) -> sympy.Basic:
    """A size as Dynamo knows it."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(0)


def _at_hand(size: int | torch.SymInt) -> int:
    """A size as it is in this call, in which all sizes of inputs are known."""
    known = size_at_hand(size)
    assert known is not None
    return known


def _known(size: int | torch.SymInt) -> tuple[int, sympy.Basic]:
    """A size as what it is compared by: of two that are equal by chance, Dynamo has different symbols."""
    return _at_hand(size), _expression(size)


def _fixed(node: fx.Node, graph_input: GraphInput) -> GraphInput:
    """An input with the sizes of this call."""
    value = _value(node)
    if (
        graph_input.is_stored
        or is_traceable_wrapper_subclass(value)
        or not isinstance(value, torch.Tensor)
        or not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    ):
        return graph_input
    sizes, strides = ([_at_hand(size) for size in numbers] for numbers in (value.shape, value.stride()))
    mode = detect_fake_mode([value])
    assert mode is not None
    with mode:
        fixed = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    fixed.requires_grad_(value.requires_grad)
    return replace(graph_input, given=fixed, taken=fixed, seen=fixed)
