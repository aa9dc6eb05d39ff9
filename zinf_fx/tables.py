"""Tables of text."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tabulate import tabulate


def table(rows: Sequence[Sequence[str]], headers: Sequence[str] = (), left: Collection[int] = (0,)) -> str:
    """Columns, those numbered in `left` flush left and all others right; the headers stand above a line of dashes."""
    align = ["left" if column in left else "right" for column in range(max(map(len, rows)))]
    layout = "simple" if headers else "plain"
    text = tabulate(rows, headers=headers, tablefmt=layout, disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in text.splitlines())


def counted(number: int, noun: str) -> str:
    """`1,234 tiles`, or `1 tile`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def digits(value: float) -> str:
    """Three significant digits, without an exponent: 0.0123, 12.3, 1,230."""
    rounded = float(f"{value:.3g}")
    places = max(2 - math.floor(math.log10(rounded)), 0) if rounded else 0
    return f"{rounded:,.{places}f}"
