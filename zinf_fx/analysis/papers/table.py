"""Comparisons as plain text, of at most 80 columns: the paper's figures, ours below them, and notes on differences."""

from __future__ import annotations

import textwrap

from zinf_fx.analysis.papers.comparison import Cell, Comparison
from zinf_fx.tables import table

_WIDTH = 80


def comparison_text(comparison: Comparison) -> str:
    """One table. A letter marks a figure that differs by more than rounding; a note below says why."""
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
    """The range of what we have more or less than the paper."""
    shares = sorted(
        {f"{float(f'{100 * cell.difference:.2g}'):+g} %" for cell in cells}, key=lambda text: float(text[:-2])
    )
    return shares[0] if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
