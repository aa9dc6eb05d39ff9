"""Boxes of tensors: which elements of a whole tensor a part of it is, and what two parts have in common.

A box is a part of a tensor between two corners, as a rank has it of a DTensor; the box of an undivided tensor is the
tensor. Elements of a box are counted in its row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """Elements of a tensor from `offsets` on, `shape` of them."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """How many elements lie from one to the next along each dimension, in row-major order."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    def within(self, other: Box) -> Box | None:
        """Return what both have in common; None if that is nothing."""
        low = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        shape = tuple(min(a + n, b + m) - start for start, (a, n, b, m) in zip(low, ends, strict=True))
        return Box(low, shape) if all(size > 0 for size in shape) else None

    def position(self, offsets: Sequence[int]) -> int:
        """Return the number, among the elements of this box, of the one at `offsets` of the tensor."""
        steps = zip(offsets, self.offsets, self.strides, strict=True)
        return sum((place - start) * stride for place, start, stride in steps)

    def hull(self, part: Box) -> range:
        """Return the elements of this box from the first to the last that lies in `part`, which is inside of it."""
        last = tuple(start + size - 1 for start, size in zip(part.offsets, part.shape, strict=True))
        return range(self.position(part.offsets), self.position(last) + 1)

    def boxes_of(self, elements: range) -> Iterator[Box]:
        """Yield consecutive elements of this box, as boxes of the tensor, in order: whole rows as one."""
        if not elements:
            return
        if len(self.shape) < 2:
            start = self.offsets[0] + elements.start if self.shape else 0
            yield Box((start,), (len(elements),)) if self.shape else self
            return
        row = math.prod(self.shape[1:])
        head, body, tail = _rows(elements, row)
        yield from self._boxes_in_row(elements.start // row, head)
        if body:
            yield Box((self.offsets[0] + body.start, *self.offsets[1:]), (len(body), *self.shape[1:]))
        yield from self._boxes_in_row(elements.stop // row, tail)

    def _boxes_in_row(self, row: int, elements: range) -> Iterator[Box]:
        for box in Box(self.offsets[1:], self.shape[1:]).boxes_of(elements):
            yield Box((self.offsets[0] + row, *box.offsets), (1, *box.shape))


def _rows(elements: range, row: int) -> tuple[range, range, range]:
    """Divide consecutive elements into rows of so many: return those of a first row that is not whole, in that row; the
    numbers of the whole rows; and those of a last row that is not whole, in that row."""
    first, last = -(-elements.start // row), elements.stop // row
    if first > last:  # all in one row
        start = elements.start % row
        return range(start, start + len(elements)), range(0), range(0)
    head = range(elements.start % row, row) if elements.start % row else range(0)
    return head, range(first, last), range(elements.stop % row)


def view_of(memory: torch.Tensor, box: Box, first: int, part: Box) -> torch.Tensor:
    """Return the elements of `part` in `memory`, which has those of `box` from number `first` on, flat."""
    start = memory.storage_offset() + box.position(part.offsets) - first
    return memory.as_strided(part.shape, box.strides, start)


def copy_common(
    target: torch.Tensor, box: Box, elements: range, source: torch.Tensor, source_box: Box, source_elements: range
) -> None:
    """Copy what two memories have in common: each has some consecutive elements of a box of the same tensor, flat."""
    if box == source_box:
        start, stop = max(elements.start, source_elements.start), min(elements.stop, source_elements.stop)
        if start < stop:
            theirs = source[start - source_elements.start : stop - source_elements.start]
            target[start - elements.start : stop - elements.start].copy_(theirs)
        return
    sources = list(source_box.boxes_of(source_elements))
    for part in box.boxes_of(elements):
        for source_part in sources:
            if (common := part.within(source_part)) is not None:
                theirs = view_of(source, source_box, source_elements.start, common)
                view_of(target, box, elements.start, common).copy_(theirs)
