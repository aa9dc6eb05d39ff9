"""The papers' printed figures beside what their formulas give."""

from __future__ import annotations

from papers import zero, zero_infinity
from papers.comparison import Comparison


def comparisons() -> list[Comparison]:
    """Return every table, in the order of the papers."""
    of_zero = [*map(zero.table_1, zero.MODELS), zero.table_2(), zero.volumes(), zero.activations()]
    figures = [zero_infinity.figure_2a(), zero_infinity.figure_3(), zero_infinity.table_3()]
    return [*of_zero, *figures, zero_infinity.degradations(), zero_infinity.table_4()]
