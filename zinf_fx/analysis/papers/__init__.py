"""The papers' printed figures beside what the formulas give."""

from __future__ import annotations

from collections.abc import Iterator

from zinf_fx.analysis.papers import zero, zero_infinity
from zinf_fx.analysis.papers.comparison import Cell, Comparison


def comparisons() -> Iterator[Comparison]:
    """Every table, in the order of the papers."""
    yield from zero.comparisons()
    yield from zero_infinity.comparisons()


__all__ = ["Cell", "Comparison", "comparisons"]
