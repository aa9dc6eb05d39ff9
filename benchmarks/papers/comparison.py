"""A printed figure beside ours: whether they agree and, where they don't, why; and tables of these as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal

from zinf_fx.tables import table

Relation = Literal["=", ">", "<"]


@dataclass(frozen=True)
class Cell:
    """One figure.

    Attributes:
        printed: digits as the paper has them; their last place says how far it was rounded.
        ours: in the same unit.
        relation: the paper's: the figure itself, or "over" or "less than" a figure.
        why: what explains a difference that isn't rounding.
    """

    printed: str
    ours: float
    relation: Relation = "="
    why: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether ours, rounded, is the printed figure, or is over or less than it as the paper says."""
        if self.relation == "=":
            return self._rounded(self._places) == Decimal(self.printed)
        return self.ours > float(self.printed) if self.relation == ">" else self.ours < float(self.printed)

    @property
    def shown(self) -> str:
        """Ours with as many places as the paper has; with one more where it says "over" or "less than"."""
        return str(self._rounded(self._places + (self.relation != "=")))

    @property
    def difference(self) -> float:
        """Ours less the printed figure, as a share of the printed figure."""
        return self.ours / float(self.printed) - 1

    @property
    def _places(self) -> int:
        return -Decimal(self.printed).as_tuple().exponent

    def _rounded(self, places: int) -> Decimal:
        # What is half-way between two figures in decimals may be a little off in binary.
        exact = Decimal(str(round(self.ours, 9)))
        return exact.quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_UP)


@dataclass(frozen=True)
class Comparison:
    """A table of the paper: a name per row, and a cell per column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]

    @classmethod
    def of_one_column(cls, title: str, column: str, cells: Mapping[str, Cell]) -> Comparison:
        """Return a comparison with a cell per row, by the rows' names."""
        return cls(title, (column,), tuple((name, (cell,)) for name, cell in cells.items()))

    @property
    def cells(self) -> list[Cell]:
        """Return all cells."""
        return [cell for _, cells in self.rows for cell in cells]


# -- as plain text, of at most 80 columns: the paper's figures, ours below them, and notes on differences --------------

_WIDTH = 80


def comparison_text(comparison: Comparison) -> str:
    """Return a table as text. A letter marks a figure that differs by more than rounding; a note below says why."""
    letters = {why: chr(ord("a") + i) for i, why in enumerate(dict.fromkeys(c.why for c in comparison.cells if c.why))}
    if len(comparison.columns) == 1:
        heads = ["", "paper", "formula"]
        rows = [[name, _printed(cell), _ours(cell, letters)] for name, (cell,) in comparison.rows]
        fixed = 1
    else:
        heads = ["", "", *(column.replace(" ", "\n") for column in comparison.columns)]
        rows = []
        for name, cells in comparison.rows:
            rows.append([name, "paper", *(_printed(cell) for cell in cells)])
            rows.append(["", "formula", *(_ours(cell, letters) for cell in cells)])
        fixed = 2
    lines = [*textwrap.wrap(comparison.title, _WIDTH), "", table(rows, heads, left=range(fixed))]
    lines += [""] if letters else []
    for why, letter in letters.items():
        note = f"{letter}  {_differences([cell for cell in comparison.cells if cell.why == why])}: {why}."
        lines += textwrap.wrap(note, _WIDTH, subsequent_indent="   ")
    return "\n".join(lines) + "\n"


def _printed(cell: Cell) -> str:
    # The letter's two columns, so that figures stand below each other.
    return f"{'' if cell.relation == '=' else cell.relation + ' '}{cell.printed}  "


def _ours(cell: Cell, letters: dict[str, str]) -> str:
    return f"{cell.shown} {letters[cell.why] if cell.why else ' '}"


def _differences(cells: list[Cell]) -> str:
    """Return the range of what we have more or less than the paper."""
    shares = sorted(
        {f"{float(f'{100 * cell.difference:.2g}'):+g} %" for cell in cells}, key=lambda text: float(text[:-2])
    )
    return shares[0] if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
