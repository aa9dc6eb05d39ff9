"""A printed figure beside ours: whether they agree and, where they don't, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal

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
        """Of a cell per row, by the rows' names."""
        return cls(title, (column,), tuple((name, (cell,)) for name, cell in cells.items()))

    @property
    def cells(self) -> list[Cell]:
        """All of them."""
        return [cell for _, cells in self.rows for cell in cells]
