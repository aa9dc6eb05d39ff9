"""Bytes over time as a chart in text: columns from left to right, rows from 0 up to the largest value or the budget.

118.0 MiB |   #      #
          |  :#..-..:#.----------- budget 96.0 MiB
          |  ##########    :#.
          | .##########...:###.
        0 +------------------------
           0    5    10   15   20
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import ceil

from zinf_fx.sizes import in_words

ROWS = 5
# Room for labels, the same in every chart, so that columns of charts below each other are in line.
_MARGIN = len("1023.9 MiB")
_BUDGET = " budget {}"
_BUDGET_ROOM = len(_BUDGET.format("1023.9 MiB"))
# Columns that one value takes at most, where there are few.
_MOST_REPEATED = 8
# A budget further above the curve than this many times its peak would press it flat, and is not drawn.
_BUDGET_IN_SIGHT = 4


@dataclass(frozen=True)
class Glyphs:
    """What a chart is drawn with.

    Attributes:
        fills: of a cell, from a little to all of it.
        above: a cell of what is stacked on the curve.
        budget, side, corner, floor: of lines.
    """

    fills: str
    above: str
    budget: str
    side: str
    corner: str
    floor: str


ASCII = Glyphs(".:#", "+", "-", "|", "+", "-")
BLOCKS = Glyphs("▁▂▃▄▅▆▇█", "░", "╌", "│", "└", "─")


@dataclass(frozen=True)
class Curve:
    """What a chart shows.

    Attributes:
        values: bytes, at equal distances.
        above: bytes stacked on each value; empty: none.
        budget: bytes, drawn as a line where it is in sight; None: there is none.
        first, distance: the number of the first value, and from one value to the next, for the axis; numbers below 0
            are not printed there.
        marks: one character per value, printed below the axis; empty: none.
    """

    values: Sequence[int]
    above: Sequence[int] = ()
    budget: int | None = None
    first: int = 0
    distance: float = 1.0
    marks: str = ""

    def __post_init__(self) -> None:
        for name in ("above", "marks"):
            count = len(getattr(self, name))
            if count not in (0, len(self.values)):
                raise ValueError(f"{name} has {count} entries for {len(self.values)} values: give one each, or none")

    @property
    def peak(self) -> int:
        """The largest value, with what is stacked on it."""
        return max(self._tops(), default=0)

    @property
    def fullest(self) -> int:
        """The position of the peak, the first of several."""
        return self._tops().index(self.peak)

    @property
    def budget_in_sight(self) -> bool:
        """Whether the budget is drawn."""
        return self.budget is not None and self.budget <= _BUDGET_IN_SIGHT * self.peak

    def draw(self, glyphs: Glyphs, width: int, rows: int = ROWS) -> str:
        """The chart, at most `width` columns wide (as far as the labels allow). Nothing for a curve that is 0.

        Where there are more values than columns, a column shows the largest of its values.
        """
        if not self.peak:
            return ""
        budget = self.budget if self.budget_in_sight else None
        height = max(self.peak, budget or 0)
        at_budget = None if budget is None else min(budget * rows // height, rows - 1)
        groups = self._columns(max(width - _MARGIN - 2 - _BUDGET_ROOM, 1))
        filled = [max(self.values[i] for i in group) for group in groups]
        tops = self._tops()
        stacked = [max(tops[i] for i in group) for group in groups]
        lines = []
        for row in reversed(range(rows)):
            label = in_words(height) if row == rows - 1 else ""
            empty = glyphs.budget if row == at_budget else " "
            cells = [
                _cell(glyphs, low * rows, top * rows, height, row, empty)
                for low, top in zip(filled, stacked, strict=True)
            ]
            text = "".join(cells) + (
                _BUDGET.format(in_words(budget)) if budget is not None and row == at_budget else ""
            )
            lines.append(f"{label:>{_MARGIN}} {glyphs.side}{text}")
        lines.append(f"{'0':>{_MARGIN}} {glyphs.corner}{glyphs.floor * len(groups)}")
        lines.append(" " * (_MARGIN + 2) + self._axis(groups))
        if self.marks:
            lines.append(" " * (_MARGIN + 2) + "".join(self.marks[group[0]] for group in groups))
        return "\n".join(line.rstrip() for line in lines)

    def _tops(self) -> list[int]:
        return [low + high for low, high in zip(self.values, self.above or [0] * len(self.values), strict=True)]

    def _columns(self, room: int) -> list[range]:
        """The positions of the values that each column shows."""
        values = len(self.values)
        if values <= room:
            return [range(i, i + 1) for i in range(values) for _ in range(min(room // values, _MOST_REPEATED))]
        edges = [i * values // room for i in range(room + 1)]
        return [range(start, end) for start, end in pairwise(edges)]

    def _axis(self, groups: Sequence[range]) -> str:
        """Round numbers below the columns that show them, as many as there is room for."""
        per_column = self.distance * len(self.values) / len(groups)
        last = self.first + self.distance * (len(self.values) - 1)
        room = len(str(int(last))) + 2
        step = next(
            size * 10**power for power in count() for size in (1, 2, 5) if size * 10**power >= room * per_column
        )
        text = ""
        for number in range(0, int(last) + 1, step):
            column = ceil((number - self.first) / per_column)
            text = f"{text:<{column}}{number}"
        return text


def _cell(glyphs: Glyphs, filled: int, top: int, height: int, row: int, empty: str) -> str:
    """One character: as much of it is filled as `filled` has beyond `row` rows, each of `height`; a rest counts."""
    levels = len(glyphs.fills)
    if (level := -(-filled * levels // height) - row * levels) > 0:
        return glyphs.fills[min(level, levels) - 1]
    return glyphs.above if top > row * height else empty
