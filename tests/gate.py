"""Which cases of a table are in the gate."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def slow(*values: object) -> object:
    """A case that only `-m slow` runs: what it would find, others of its table are likely to find, too."""
    return pytest.param(*values, marks=pytest.mark.slow)


def named(names: Iterable[str], of_the_gate: Collection[str]) -> list[object]:
    """All names of a table, those that are not of the gate as slow ones."""
    return [name if name in of_the_gate else slow(name) for name in names]
