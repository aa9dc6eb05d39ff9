"""Cross-entropy over logits that are never whole: the other half of a tiled head (ZeRO-Infinity, section 5.1.3).

Where a tiled head's ranges of logits are put together only for a log-softmax and a negative log-likelihood, each range
is reduced as soon as it is there: to the logarithm of its sum of exponentials, and the logits of the targets in it. In
backward, each range of logits is computed again from the activation and the tile, which is there for the gradients
anyway; from it come the range of the logits' gradient and, of that, the parts of the input's and the tile's gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from zinf_fx.passes.ir.framework import GraphContext, Pass, arguments_of, nodes_calling, operand
from zinf_fx.passes.ir.rewriting import emit, erase_unused, repeat_in_backward
from zinf_fx.passes.tiling.weight_uses import Rows

aten = torch.ops.aten

_PASSED_ON = {aten.view.default, aten._unsafe_view.default, aten._to_copy.default, aten.reshape.default}
_MEAN = 1


class TileCrossEntropy(Pass):
    """Reduce each range of a tiled head's logits where it is computed, forward and backward."""

    name = "tile_cross_entropy"
    requires = ("tiled",)
    changes_numerics = True

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        for softmax in nodes_calling(graph, aten._log_softmax.default):
            loss = _match(softmax)
            if loss is not None:
                loss.divide()
        return context


@dataclass(frozen=True)
class _Loss:
    """The nodes around one log-softmax.

    Attributes:
        parts: the ranges of logits, [rows, range]; `ranges` says which.
        softmax, nll: the log-softmax of their concatenation, and the loss.
        gradient: what backward makes of them, when there is a backward: the logits' gradient.
        slices: by range, what backward takes of `gradient`.
    """

    parts: tuple[fx.Node, ...]
    ranges: tuple[Rows, ...]
    softmax: fx.Node
    nll: fx.Node
    nll_backward: fx.Node | None
    slices: dict[int, list[fx.Node]]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the loss is computed."""
        return self.softmax.meta["val"].dtype

    def divide(self) -> None:
        """Put what reduces each range in the place of the log-softmax and the loss, and of their gradients.

        Values per row are columns, [rows, 1], so that they go along with logits.
        """
        graph, new = self.softmax.graph, partial(emit, self.softmax)
        _, labels, _, reduction, ignored = arguments_of(self.nll)
        _hoist(labels, self.parts[0])
        with graph.inserting_before(self.parts[0]):
            target = self._again(aten.unsqueeze.default, labels, 1)
            counted = self._again(aten.ne.Scalar, target, ignored)
            target = self._again(aten.where.ScalarOther, counted, target, 0)
        ranges = []
        normaliser = chosen = None
        for part, rows in zip(self.parts, self.ranges, strict=True):
            with graph.inserting_before(part.next):
                values = part
                if part.meta["val"].dtype != self.dtype:
                    values = self._again(aten._to_copy.default, part, dtype=self.dtype)
                inside, place = rows.indices(self.softmax, target, 0)
                ranges.append((values, inside, place))
                before, normaliser = normaliser, new(aten.logsumexp.default, values, [1], True)
                theirs = new(aten.gather.default, values, 1, place)
                if before is not None:
                    normaliser = new(aten.logaddexp.default, before, normaliser)
                    theirs = new(aten.where.self, inside, theirs, chosen)
                chosen = theirs
            repeat_in_backward(part)
        with graph.inserting_before(self.nll):
            count = new(aten.sum.default, new(aten._to_copy.default, counted, dtype=self.dtype))
            lost = new(aten.where.ScalarOther, counted, new(aten.sub.Tensor, normaliser, chosen), 0.0)
            lost = new(aten.sum.default, lost) if reduction else new(aten.squeeze.dim, lost, 1)
            if reduction == _MEAN:
                lost = new(aten.div.Tensor, lost, count)
        if self.nll_backward is not None and normaliser is not None:
            self._divide_backward(self.nll_backward, ranges, normaliser, counted, count)
        for result in list(self.nll.users):
            assert result.target is operator.getitem
            result.replace_all_uses_with((lost, count)[arguments_of(result)[1]])
            graph.erase_node(result)
        erase_unused(self.nll)

    def _divide_backward(
        self,
        nll_backward: fx.Node,
        ranges: list[tuple[fx.Node, fx.Node, fx.Node]],
        normaliser: fx.Node,
        counted: fx.Node,
        count: fx.Node,
    ) -> None:
        """Of each range of logits, the gradient: the probabilities, less one at the target, times that of the loss.

        `ranges`: the logits, which rows have their target among them, and its place there.
        """
        graph, new, reduction = self.softmax.graph, partial(emit, nll_backward), self.nll.args[3]
        with graph.inserting_before(nll_backward):
            scale = operand(nll_backward)
            if reduction == _MEAN:
                scale = new(aten.div.Tensor, scale, count)
            elif not reduction:
                scale = new(aten.unsqueeze.default, scale, 1)
            scale = new(aten.where.ScalarOther, counted, scale, 0.0)
        for index, slices in self.slices.items():
            values, inside, place = ranges[index]
            first = min(slices)  # nodes compare by position
            new = partial(emit, first)
            with graph.inserting_before(first):
                probabilities = self._again(aten.exp.default, self._again(aten.sub.Tensor, values, normaliser))
                gradient = new(aten.mul.Tensor, probabilities, scale)
                less = new(aten.neg.default, new(aten.where.ScalarOther, inside, scale, 0.0))
                gradient = new(aten.scatter_add.default, gradient, 1, place, less)
                dtype = first.meta["val"].dtype
                if dtype != self.dtype:
                    gradient = new(aten._to_copy.default, gradient, dtype=dtype)
            for taken in slices:
                taken.replace_all_uses_with(gradient)
                erase_unused(taken)

    def _again(self, target: torch._ops.OpOverload, *args: object, **kwargs: object) -> fx.Node:
        """A node that backward computes anew."""
        return repeat_in_backward(emit(self.softmax, target, *args, **kwargs))


def _match(softmax: fx.Node) -> _Loss | None:
    """The loss that a log-softmax belongs to, if its input is nothing but a concatenation of ranges of logits."""
    logits, dim, _ = arguments_of(softmax)
    source = logits
    while source.target in _PASSED_ON and len(source.users) == 1:
        source = operand(source)
    shape, count = logits.meta["val"].shape, logits.meta["val"].dim()
    if source.target is not aten.cat.default or len(source.users) > 1 or count != 2 or dim not in (1, -1):
        return None
    parts = tuple(arguments_of(source)[0])
    sizes = [part.meta["val"].shape for part in parts]
    if any(len(size) != 2 or size[0] != shape[0] for size in sizes) or sum(size[1] for size in sizes) != shape[1]:
        return None
    ends = [sum(size[1] for size in sizes[: i + 1]) for i in range(len(sizes))]
    ranges = tuple(Rows(end - size[1], end, end == shape[1]) for end, size in zip(ends, sizes, strict=True))
    users = list(_users(softmax))
    nll = [user for user in users if user.target is aten.nll_loss_forward.default]
    backward = [user for user in users if user.target is aten._log_softmax_backward_data.default]
    further_users = set(users) - set(nll) - set(backward)
    if len(nll) != 1 or len(backward) > 1 or nll[0].args[2] is not None or operand(nll[0], 1).meta["val"].dim() != 1:
        return None
    if not backward:
        return _Loss(parts, ranges, softmax, nll[0], None, {}) if not further_users else None
    (gradient,) = backward
    nll_backward = operand(gradient)
    if nll_backward.target is not aten.nll_loss_backward.default or further_users - {nll_backward}:
        return None
    slices = _slices(gradient, ranges, sizes)
    if len(nll_backward.users) > 1 or slices is None:
        return None
    return _Loss(parts, ranges, softmax, nll[0], nll_backward, slices)


def _users(value: fx.Node) -> Iterator[fx.Node]:
    """What uses a value, under whatever name."""
    for user in value.users:
        if user.target in (aten.detach.default, aten.alias.default):
            yield from _users(user)
        else:
            yield user


def _slices(gradient: fx.Node, ranges: tuple[Rows, ...], sizes: list) -> dict[int, list[fx.Node]] | None:
    """By range, what takes it from the gradient of the logits; None: something takes more."""
    while len(gradient.users) == 1 and next(iter(gradient.users)).target in _PASSED_ON:
        gradient = next(iter(gradient.users))
    number: dict[tuple[int, ...], int] = {(rows.start, rows.end): index for index, rows in enumerate(ranges)}
    by_index: dict[int, list[fx.Node]] = {}
    for user in gradient.users:
        index = number.get(arguments_of(user)[2:4]) if user.target is aten.slice.Tensor and user.args[1] == 1 else None
        if index is None or user.meta["val"].shape != sizes[index]:
            return None
        by_index.setdefault(index, []).append(user)
    return by_index


def _hoist(node: fx.Node, before: fx.Node) -> None:
    """Move a node, and what it is computed from, before another."""
    for source in sorted({*_sources(node, before)}):
        before.prepend(source)


def _sources(node: fx.Node, after: fx.Node) -> Iterator[fx.Node]:
    if node > after and node.op != "placeholder":
        yield node
        for source in node.all_input_nodes:
            yield from _sources(source, after)
