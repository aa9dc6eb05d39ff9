"""Forward and backward of one micro-batch -> those of several, by groups of operators.

A loop over k micro-batches moves every parameter through the memory hierarchy k times. Here all micro-batches run a
group of operators before the next group begins, so that a tile is there once per pass; gradients are added where they
are computed, and leave once. Published as vertical scheduling (GreedySnake), where a group is an operator. What is
computed and used up in a group is there of one micro-batch at a time, and the group's tiles of all of them. The more
operators a group has, the less there is of all micro-batches at once, as in a loop, which has all in one.

[Note: micro-batches] A graph is captured for one of k micro-batches: `zinf::micro_batch` is that part of what holds
the batch, and `zinf::join` makes what the caller gets of what every micro-batch computes. What depends on a micro-batch
is repeated for each; everything else (tiles, masks, constants) is computed once. Each micro-batch computes what the
loop would compute, in the shapes of the loop, and a gradient is the same sum in the same order, so that every bit is
the same. A group of several operators is one operator of the schedule, whose tiles come ahead of it, and those of the
next groups while it runs. But for that, no later stage knows of micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from zinf_fx import ops
from zinf_fx.errors import ConfigError
from zinf_fx.passes.ir.framework import GROUP, GraphContext, arguments_of, operator_of, results_of
from zinf_fx.passes.ir.randomness import draws, draws_by_shape, run_by
from zinf_fx.passes.lowering.operator_groups import groups_of
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.plan.schedule import PROLOGUE

aten = torch.ops.aten

_TAKE_ALL = (ops.reduce_scatter, ops.together, ops.join)


def vertical(forward: fx.GraphModule, backward: fx.GraphModule, context: GraphContext, results: int) -> None:
    """Make a step of `Config.micro_batches` of the partitioned graphs of one: see [Note: micro-batches]. `results`: how
    many outputs of forward the caller gets; the others are saved for backward.

    Raises: ConfigError where what the caller gets is neither a matter of the whole batch nor of its parts.
    """
    count = context.config.micro_batch_count
    if count == 1:
        return
    step = _Repeated(forward.graph, replace(context, kind="forward", gradients={}), count)
    of_each = step.finish(results)
    forward.graph = step.graph
    inputs = backward.graph.find_nodes(op="placeholder")
    saved = {placeholder for placeholder, is_of_each in zip(inputs, of_each, strict=False) if is_of_each}
    step = _Repeated(backward.graph, replace(context, kind="backward", backward_outputs=0), count, saved)
    step.finish_with_sums()
    backward.graph = step.graph


class _Repeated:
    """A graph with what depends on a micro-batch repeated for each.

    Attributes:
        graph: the new graph.
    """

    def __init__(
        self, template: fx.Graph, context: GraphContext, count: int, saved: Collection[fx.Node] | None = None
    ) -> None:
        """`saved`: the inputs of a backward graph that every micro-batch has one of; None: it is a forward graph, whose
        inputs are those of the batch."""
        SinkGathers()(template, context)
        Regions()(template, context)
        self.graph = fx.Graph(template.owning_module)
        self._template, self._count = template, count
        self._groups = groups_of(template, context)
        self._once: dict[fx.Node, fx.Node] = {}
        self._each: dict[fx.Node, list[fx.Node]] = {}  # what every micro-batch has one of
        self._sums: dict[fx.Node, fx.Node] = {}  # of what has been emitted
        for placeholder in template.find_nodes(op="placeholder"):
            if saved is None or placeholder not in saved:
                self._once[placeholder] = self.graph.node_copy(placeholder)
            else:
                names = [_name(placeholder, number) for number in range(count)]
                self._each[placeholder] = [self._made("placeholder", name, (), {}, placeholder, name) for name in names]
        self._repeated, self._after = _depending(template, self._each, self._groups)
        self._summed = {term for node in self._after for term in _summed_for(node)}
        if saved is not None:
            self._summed.update(term for term in template.output_node().all_input_nodes if term in self._repeated)
        for placeholder, copies in self._each.items():
            for number, copy in enumerate(copies if placeholder in self._summed else ()):
                self._add(placeholder, copy, number)
        self._states = self._draw_ahead(list(filter(draws, template.nodes)))
        inner = [node for node in template.nodes if node.op not in ("placeholder", "output")]
        for number, nodes in groupby(inner, self._group):
            self._emit(number, list(nodes))

    def finish(self, results: int) -> list[bool]:
        """Return what a forward graph does: its first `results` outputs, and of what is saved, what each micro-batch
        has. Tells of everything that the template saves whether each has one. Raises: ConfigError."""
        for device, states in self._states.items():
            self.graph.call_function(ops.set_random_state, (states[-1], device))
        outputs = results_of(self._template)
        parts = [node for node in self._template.nodes if _writes_to_an_input(node)]
        for node in [*parts, *(result for result in outputs[:results] if result in self._repeated)]:
            raise ConfigError(
                f"micro_batches={self._count}: the model writes to a buffer, or returns what depends on the batch and "
                f"is no part of it ({node.format_node()}). Statistics of a batch (BatchNorm) need the whole batch: "
                "leave micro_batches out, or use a norm without them"
            )
        saved = [self._each.get(node) or [self._once[node]] for node in outputs[results:]]
        self._returns([*(self._once.get(result, result) for result in outputs[:results]), *chain(*saved)])
        return [node in self._each for node in outputs[results:]]

    def finish_with_sums(self) -> None:
        """Return what a backward graph does: gradients of all micro-batches."""
        results = results_of(self._template)
        self._returns([self._sum(result) if isinstance(result, fx.Node) else result for result in results])

    def _returns(self, results: list[fx.Node | None]) -> None:
        old = self._template.output_node()
        container: Any = type(old.args[0])  # a list or a tuple
        self.graph.output(container(results)).meta = dict(old.meta)

    def _made(self, op: str, target: Any, args: tuple, kwargs: dict, like: fx.Node, name: str | None = None) -> fx.Node:
        """A new node whose value is of the type of `like`'s."""
        node = self.graph.create_node(op, target, args, kwargs, name)
        node.meta = dict(like.meta)
        return node

    def _group(self, node: fx.Node) -> int:
        return PROLOGUE if operator_of(node) == PROLOGUE else self._groups[operator_of(node)]

    def _emit(self, group: int, nodes: Sequence[fx.Node]) -> None:
        """A group of operators: what all micro-batches share, each of them, and, in the last, what is made of all."""
        before = next(iter(reversed(self.graph.nodes)), None)
        for node in nodes:
            if node not in self._repeated and node not in self._after:
                self._once[node] = self.graph.node_copy(node, self._once.__getitem__)
        for number in range(self._count):
            for node in nodes:
                if node in self._repeated:
                    self._emit_one(node, number)
                elif node in self._after and number == self._count - 1:
                    self._once[node] = self._joined(node) if node.target is ops.join else self._of_sums(node)
        if len(set(map(operator_of, nodes))) > 1:
            self._note(group, before)

    def _note(self, group: int, before: fx.Node | None) -> None:
        """All that follows a node is one group."""
        for node in reversed(self.graph.nodes):
            if node is before:
                break
            node.meta[GROUP] = group

    def _emit_one(self, node: fx.Node, number: int) -> None:
        """What one micro-batch has of a node."""
        name = _name(node, number)
        if node.target is ops.micro_batch:
            batch, dim, _ = arguments_of(node)
            size = node.meta["val"].shape[dim]
            bounds = (dim, number * size, (number + 1) * size)
            copy = self._made("call_function", aten.slice.Tensor, (self._once[batch], *bounds), {}, node, name)
            copy.meta["val"] = batch.meta["val"].narrow(dim, number * size, size)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: self._of(argument, number))
            device = _device_of(node) if draws(node) else None
            if device is not None:
                self.graph.call_function(ops.set_random_state, (self._states[device][number], device))
            copy = self._made(node.op, node.target, args, kwargs, node, name)
            if device is not None:
                self._states[device][number] = self._state(device)
        self._each.setdefault(node, []).append(copy)
        if node in self._summed:
            self._add(node, copy, number)

    def _of(self, node: fx.Node, number: int) -> fx.Node:
        return self._each[node][number] if node in self._each else self._once[node]

    def _add(self, node: fx.Node, copy: fx.Node, number: int) -> None:
        """Add what a micro-batch has to what those before it have: the first sum is new memory, to which others are
        added."""
        if number == 0:
            self._sums[node] = copy
        else:
            add = aten.add.Tensor if number == 1 else aten.add_.Tensor
            self._sums[node] = self._made("call_function", add, (self._sums[node], copy), {}, copy)

    def _sum(self, node: fx.Node) -> fx.Node:
        """The sum over all micro-batches; of what is already made of all, itself."""
        if node in self._after:
            return self._once[node]
        if node not in self._sums:  # which depends on no micro-batch
            for number in range(self._count):
                self._add(node, self._once[node], number)
        return self._sums[node]

    def _of_sums(self, node: fx.Node) -> fx.Node:
        """What is made of sums."""
        summed = _summed_for(node)
        return self.graph.node_copy(node, lambda term: self._sum(term) if term in summed else self._once[term])

    def _joined(self, node: fx.Node) -> fx.Node:
        """What the caller gets of all micro-batches."""
        value, how, count, *dim = arguments_of(node)
        if how == "cat":
            parts = [self._of(value, number) for number in range(count)]
            return self._made("call_function", aten.cat.default, (parts, *dim), {}, node, node.name)
        if value in self._once and (how == "mean" or not value.meta["val"].is_floating_point()):
            return self._once[value]  # which all have alike
        if not value.meta["val"].is_floating_point() and not _is_count(value):
            raise ConfigError(
                f"micro_batches={self._count}: the model returns a whole number of the batch that is neither a sum "
                f"nor a count ({value.format_node()}), so that it can't be made of those of micro-batches: return what "
                "it is computed from, with the batch's dimension"
            )
        total = self._sum(value)
        if how == "sum":
            return total
        return self._made("call_function", aten.div.Tensor, (total, count), {}, node, node.name)

    # Random numbers

    def _draw_ahead(self, nodes: Sequence[fx.Node]) -> dict[torch.device, list[fx.Node]]:
        """By device, the state of its generator where each micro-batch begins, as the loop would find it: after the
        forward passes of those before, which draw here from what has no values. Raises: ConfigError."""
        for node in nodes:
            if run_by(node)[0] is not node.target:
                raise ConfigError(
                    f"micro_batches={self._count}: the model draws random numbers in torch.utils.checkpoint "
                    f"({node.format_node()}), which backward repeats: take the checkpointing out, and give "
                    "activations='recompute'"
                )
            if not draws_by_shape(node):
                raise ConfigError(
                    f"micro_batches={self._count}: how many random numbers {node.target} draws may depend on values, "
                    f"so that those of a loop are not known ahead ({node.format_node()}): leave micro_batches out"
                )
        states: dict[torch.device, list[fx.Node]] = {}
        for device in dict.fromkeys(map(_device_of, nodes)):
            states[device] = [self._state(device)]
            for _ in range(1, self._count):
                for node in nodes:
                    if _device_of(node) == device:
                        self._draw_from_nothing(node)
                states[device].append(self._state(device))
        return states

    def _draw_from_nothing(self, node: fx.Node) -> None:
        def nothing(node: fx.Node) -> fx.Node:
            value = node.meta["val"]
            if not isinstance(value, torch.Tensor):
                return self._once[node]
            options = {"dtype": value.dtype, "device": value.device}
            if value.is_contiguous():
                return self._made("call_function", aten.zeros.default, (list(value.shape),), options, node)
            strides = zip(value.shape, value.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in strides) if value.numel() else 0
            flat = self._made("call_function", aten.zeros.default, ([extent],), options, node)
            layout = (list(value.shape), list(value.stride()))  # by which kernels may draw in another order
            return self._made("call_function", aten.as_strided.default, (flat, *layout), {}, node)

        target, args = run_by(node)
        args, kwargs = fx.map_arg((args, node.kwargs), nothing)
        self._made("call_function", target, args, kwargs, node)

    def _state(self, device: torch.device) -> fx.Node:
        return self.graph.call_function(ops.random_state, (device,))


def _name(node: fx.Node, number: int) -> str:
    """What is saved has one name in forward and backward."""
    return f"{node.name}_of_{number}"


def _device_of(node: fx.Node) -> torch.device:
    return next(leaf.device for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor))


def _depending(
    template: fx.Graph, inputs: Collection[fx.Node], groups: Sequence[int]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that depend on a micro-batch, as those `inputs` do, and those that take what all have computed."""
    repeated, after = set(inputs), _sums_over_groups(template, groups)
    for node in template.nodes:
        if node.op in ("placeholder", "output") or node in after:
            continue
        if node.target in _TAKE_ALL or not after.isdisjoint(node.all_input_nodes):
            after.add(node)
        elif node.target is ops.micro_batch or draws(node) or not repeated.isdisjoint(node.all_input_nodes):
            repeated.add(node)
    return repeated, after


def _sums_over_groups(template: fx.Graph, groups: Sequence[int]) -> set[fx.Node]:
    """The sums of gradients that several groups compute for one tile, as for a tied weight: each of them is summed
    over the micro-batches by itself, or all would be held until the last one is there. The loop adds in another order,
    so that only here a gradient may differ from its in the last bits."""
    sums: set[fx.Node] = set()
    due = [term for node in template.nodes if node.target in _TAKE_ALL for term in _summed_for(node)]
    while due:
        node = due.pop()
        if node.target is aten.add.Tensor and not node.kwargs and len(node.users) == 1:
            terms = [term for term in node.args if isinstance(term, fx.Node)]
            mine = groups[operator_of(node)]
            if len(terms) == 2 and any(groups[max(operator_of(term), 0)] < mine for term in terms):
                sums.add(node)
                due += terms
    return sums


_COUNTS = (aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
_OF_COUNTS = (aten.add.Tensor, aten.sub.Tensor, aten._to_copy.default, aten.clone.default, aten.alias.default)


def _is_count(node: fx.Node) -> bool:
    """Whether a value of the batch is the sum of those of its parts."""
    if node.target in _COUNTS:
        return True
    return node.target in _OF_COUNTS and all(isinstance(term, fx.Node) and _is_count(term) for term in node.args)


def _writes_to_an_input(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    writes = schema is not None and schema.is_mutable
    return writes and any(source.op == "placeholder" for source in node.all_input_nodes)


def _summed_for(node: fx.Node) -> Sequence[fx.Node]:
    """The inputs of a node of which it takes the sums over all micro-batches."""
    if node.target is ops.reduce_scatter:
        return arguments_of(node)[1:]
    if node.target is ops.together:
        return arguments_of(node)[0]
    if node.target is ops.join:
        return arguments_of(node)[:1] if node.args[1] != "cat" else ()
    return (
        arguments_of(node) if node.target is aten.add.Tensor else ()
    )  # of [Note: micro-batches], the sums over groups
