"""Parts of tensors know which elements they have, and what two of them have in common."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_fx.checkpoint.copying import needed_for
from zinf_fx.checkpoint.manifest import SavedPiece, SavedTensor, ShardMetadata
from zinf_fx.runtime.tensor.boxes import Box, copy_common


@st.composite
def shapes_and_boxes(draw: st.DrawFn, number: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    boxes = []
    for _ in range(number):
        corners = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
        boxes.append(Box(tuple(low for low, _ in corners), tuple(high - low for low, high in corners)))
    return shape, boxes


def some_of(draw: st.DrawFn, box: Box) -> range:
    low, high = sorted(draw(st.lists(st.integers(0, box.numel), min_size=2, max_size=2)))
    return range(low, high)


def elements_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole.reshape(-1)


@given(shapes_and_boxes(1), st.data())
def test_consecutive_elements_are_boxes_in_order(drawn: tuple[tuple[int, ...], list[Box]], data: st.DataObject):
    shape, (box,) = drawn
    whole = torch.arange(Box.whole(shape).numel).view(shape)
    elements = data.draw(st.composite(lambda draw: some_of(draw, box))())
    parts = list(box.boxes_of(elements))
    joined = torch.cat([elements_of(whole, part) for part in parts]) if parts else torch.empty(0)
    assert joined.tolist() == elements_of(whole, box)[elements.start : elements.stop].tolist()
    assert len(parts) <= max(2 * len(shape) - 1, 1)


@given(shapes_and_boxes(2), st.data())
def test_what_two_have_in_common_is_copied_and_nothing_else(
    drawn: tuple[tuple[int, ...], list[Box]], data: st.DataObject
):
    shape, (own, other) = drawn
    whole = torch.arange(Box.whole(shape).numel).view(shape)
    mine, theirs = (data.draw(st.composite(lambda draw, box=box: some_of(draw, box))()) for box in (own, other))
    source = elements_of(whole, other)[theirs.start : theirs.stop].clone()
    target = torch.full((len(mine),), -1)
    copy_common(target, own, mine, source, other, theirs)
    wanted = elements_of(whole, own)[mine.start : mine.stop]
    there = set(source.tolist())
    assert target.tolist() == [value if value in there else -1 for value in wanted.tolist()]


def saved(shape: tuple[int, ...], box: Box, counts: list[int]) -> SavedTensor:
    """Return a tensor of which a box is saved in pieces of so many elements, the last of the rest."""
    starts = [sum(counts[:number]) for number in range(len(counts)) if sum(counts[:number]) < box.numel]
    ends = zip(starts, [*starts[1:], box.numel], strict=True)
    pieces = Counted(SavedPiece(start, end - start, 0, 8 * start, 0) for start, end in ends)
    return SavedTensor("model/weight", torch.int64, shape, (ShardMetadata(box.offsets, box.shape, pieces),))


class Counted(tuple):
    """Pieces, and how many times any of them was looked at."""

    looks = 0

    def __getitem__(self, number: int | slice) -> object:
        item = super().__getitem__(number)
        self.looks += len(item) if isinstance(number, slice) else 1
        return item

    def __iter__(self) -> Iterator[SavedPiece]:
        self.looks += len(self)
        return super().__iter__()


@given(shapes_and_boxes(2), st.lists(st.integers(1, 20), max_size=8), st.data())
def test_the_pieces_that_are_needed_are_those_with_elements_in_common(
    drawn: tuple[tuple[int, ...], list[Box]], counts: list[int], data: st.DataObject
):
    shape, (own, other) = drawn
    whole = torch.arange(Box.whole(shape).numel).view(shape)
    tensor, mine = saved(shape, other, [*counts, other.numel]), data.draw(st.composite(some_of)(own))
    needed = [piece for _, piece in needed_for(tensor, own, mine)] if mine else []
    wanted, theirs = set(elements_of(whole, own)[mine.start : mine.stop].tolist()), elements_of(whole, other).tolist()
    with_any = [
        piece for piece in tensor.boxes[0].pieces if wanted & set(theirs[piece.start : piece.start + piece.count])
    ]
    assert [piece for piece in needed if piece in with_any] == with_any  # and some between them


def test_few_of_many_pieces_are_looked_at_for_a_chunk():
    whole = Box((0,), (4000,))
    tensor = saved((4000,), whole, [2] * 2000)
    for box in (whole, Box((0,), (3999,))):
        tensor.boxes[0].pieces.looks = 0
        assert [piece.start for _, piece in needed_for(tensor, box, range(3001, 3004))] == [3000, 3002]
        assert tensor.boxes[0].pieces.looks < 50
