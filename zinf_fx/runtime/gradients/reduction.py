"""Gradients are reduced over the ranks, each rank's shard to that rank (ZeRO, sections 5 and 7)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from zinf_fx.plan.sharding import Segment
from zinf_fx.runtime.ranks import Collective
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.local_shard import LocalShard, by_ranks
from zinf_fx.runtime.tensor.storage import TensorStorage

_blocks = 0  # of no_sync that are open; autograd runs backward of CUDA graphs in a thread of its own


@contextmanager
def no_sync() -> Iterator[None]:
    """Backward passes in the block accumulate this rank's own gradients, without reducing them over the ranks.

    As `DistributedDataParallel.no_sync`, which a model that is wrapped heeds as well: the first backward pass after the
    block reduces the sum. Gradients are not partitioned until then, whatever the stage. With one rank there is nothing
    to reduce.
    """
    global _blocks
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1


def synchronises(shard: LocalShard) -> bool:
    """Whether a backward pass reduces the gradient of the parameter with this local shard now."""
    wrapper = None if shard.wrapper is None else shard.wrapper()
    return not _blocks and (wrapper is None or wrapper.require_backward_grad_sync)


class Reduction:
    """Gradients of parameters that move together, on their way over the ranks that train these.

    The ranks of a group sum what each gets of its shard; then the ranks with the same shard, of all groups, sum theirs.
    All sums are in `Config.reduce_dtype`.

    Attributes:
        whole: whether this rank gets all of the gradients, because every rank is a group by itself.
    """

    def __init__(
        self, storages: Sequence[TensorStorage], gradients: Sequence[torch.Tensor], name: str, start: int = 0
    ) -> None:
        """Start to reduce `gradients`, of one dtype, which are not changed: those of the elements from `start` on of
        the parameters with these `storages`. `name` is the tile's, for errors."""
        config = storages[0].config
        self._ranks, self._what = storages[0].shard.ranks, f"the gradient of {name}"
        self._purpose = RECORDER.purpose()
        self._dtype = gradients[0].dtype
        self._summed_in = config.reduce_dtype or self._dtype
        self._divides = config.gradient_reduction == "mean"
        self._in_group: list[Collective] = []
        self._over_groups: Collective | None = None
        self._is_there = False
        self.whole = self._ranks.shards == 1
        self._segments: list[Sequence[Segment]] = [
            () if self.whole else storage.shard.shards.within(start, gradient.numel())
            for storage, gradient in zip(storages, gradients, strict=True)
        ]
        self._shapes = [gradient.shape for gradient in gradients]
        self._source: torch.Tensor | None = None  # is read until the collectives are over
        if len(gradients) == 1:
            self._source, self._result = self._start_alone(gradients[0], self._segments[0])
        else:
            self._source, self._result = self._start_together(gradients)
        if self.whole:
            self.advance()

    def _start_alone(self, gradient: torch.Tensor, segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce each segment of a gradient in a collective of its own: see [Note: segments]. Returns what is reduced,
        and where the result comes to lie."""
        count = gradient.numel()
        padded = sum(segment.padded for segment in segments) if segments else count
        source = gradient.new_empty(padded, dtype=self._summed_in)
        source[:count].view(gradient.shape).copy_(gradient)
        self._divide(source[:count])
        source[count:].zero_()
        if not segments:
            return source, source
        first, owner = segments[0], segments[0].owner
        if owner is None:
            result = source.new_empty(sum(segment.shard for segment in segments))
        else:
            result = source if owner == self._ranks.shard else source[:0]
        for segment in segments:
            begin, held = segment.start - first.start, segment.held - first.held
            full = source[begin : begin + segment.padded]
            if owner is None:
                mine = result[held : held + segment.shard]
                self._in_group.append(self._ranks.reduce_scatter(mine, full, self._what))
            else:
                self._in_group.append(self._ranks.reduce(full, self._what, owner))
        return source, result

    def _start_together(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce gradients of at most one segment each in one collective: see [Note: packs over ranks]. Returns the
        same as `_start_alone`."""
        *starts, end = accumulate(self._counts, initial=0)
        rows = gradients[0].new_zeros((self._ranks.shards, end), dtype=self._summed_in)
        copies = [
            both
            for gradient, start, count in zip(gradients, starts, self._counts, strict=True)
            for both in by_ranks(gradient.reshape(-1), rows[:, start : start + count])
        ]
        torch._foreach_copy_([place for _, place in copies], [part for part, _ in copies])
        self._divide(rows)
        source = result = rows.view(-1)
        if not self.whole:
            result = source.new_empty(end)
            self._in_group.append(self._ranks.reduce_scatter(result, source, self._what))
        return source, result

    def _divide(self, elements: torch.Tensor) -> None:
        """Divide before the sum, as DistributedDataParallel does: that of many could overflow fp16."""
        if self._divides:
            elements.mul_(1 / self._ranks.size)

    @property
    def _counts(self) -> list[int]:
        """How many elements of each gradient this rank gets, with padding."""
        if self.whole:
            return [shape.numel() for shape in self._shapes]
        return [sum(len(segment.held_by(self._ranks.shard)) for segment in segments) for segments in self._segments]

    @property
    def gradients(self) -> list[ReducedGradient]:
        """The gradients, each by itself."""
        ends = accumulate(self._counts)
        parts = [range(end - count, end) for end, count in zip(ends, self._counts, strict=True)]
        both = zip(parts, self._shapes, self._segments, strict=True)
        return [ReducedGradient(self, part, shape, segments) for part, shape, segments in both]

    def advance(self) -> None:
        """Start to sum over the groups when the ranks of the group have summed."""
        with RECORDER.within(self._purpose):
            self._await(self._in_group)
            self._in_group, self._source = [], None
            if self._ranks.replicas > 1 and self._over_groups is None and self._result.numel():
                self._over_groups = self._ranks.all_reduce(self._result, self._what)

    def result(self) -> torch.Tensor:
        """Return what this rank gets, flat, in the gradients' dtype, once it is there."""
        if not self._is_there:
            self.advance()
            if self._over_groups is not None:
                with RECORDER.within(self._purpose):
                    self._await([self._over_groups])
            self._result, self._is_there = self._result.to(self._dtype), True
        return self._result

    def _await(self, collectives: list[Collective]) -> None:
        started = time.perf_counter()
        for collective in collectives:
            collective.wait()
        if collectives:
            RECORDER.waited(started, detail=f"for {self._what}")


class ReducedGradient:
    """The gradient of one parameter, or of a part of it, in a `Reduction`.

    Attributes:
        reduction: the reduction that it is in.
        segments: the segments that it is of, where it is divided over ranks (see [Note: segments]).
        whole: whether this rank gets all of it.
    """

    def __init__(self, reduction: Reduction, elements: range, shape: torch.Size, segments: Sequence[Segment]) -> None:
        """`elements` are those of the parameter among all that this rank gets. `shape` is that of all of the
        gradient."""
        self.reduction, self.segments, self.whole = reduction, segments, reduction.whole
        self._elements, self._shape = elements, shape

    def wait(self) -> torch.Tensor:
        """Return what was reduced, in the gradient's dtype: flat, with padding, this rank's parts of the segments; or
        all of it, in its shape."""
        result = self.reduction.result()[self._elements.start : self._elements.stop]
        return result.view(self._shape) if self.whole else result
