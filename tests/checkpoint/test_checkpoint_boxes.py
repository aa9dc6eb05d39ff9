"""Parts of tensors: which elements they have, and what two of them have in common."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

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
    found = torch.cat([elements_of(whole, part) for part in parts]) if parts else torch.empty(0)
    assert found.tolist() == elements_of(whole, box)[elements.start : elements.stop].tolist()
    assert len(parts) <= max(2 * len(shape) - 1, 1)


@given(shapes_and_boxes(2), st.data())
def test_what_two_have_in_common_is_copied_and_nothing_else(
    drawn: tuple[tuple[int, ...], list[Box]], data: st.DataObject
):
    shape, (one, other) = drawn
    whole = torch.arange(Box.whole(shape).numel).view(shape)
    mine, theirs = (data.draw(st.composite(lambda draw, box=box: some_of(draw, box))()) for box in (one, other))
    source = elements_of(whole, other)[theirs.start : theirs.stop].clone()
    target = torch.full((len(mine),), -1)
    copy_common(target, one, mine, source, other, theirs)
    wanted = elements_of(whole, one)[mine.start : mine.stop]
    there = set(source.tolist())
    assert target.tolist() == [value if value in there else -1 for value in wanted.tolist()]
