"""Which cases of a table are in the gate."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from zinf_fx.native.engine import provider_names


def slow(*values: object) -> object:
    """Return a case that only `-m slow` runs: what it would find, others of its table are likely to find, too."""
    return pytest.param(*values, marks=pytest.mark.slow)


def named(names: Iterable[object], of_the_gate: Collection[object]) -> list[object]:
    """Return all names of a table, those that are not of the gate as slow ones."""
    return [name if name in of_the_gate else slow(name) for name in names]


def providers(names: Iterable[str] = provider_names()) -> list[object]:
    """Return the engine's providers, of which two share the code of others: libaio's calls are aio's, found elsewhere,
    and those that are buffered have the threads of "threads"."""
    return named(names, {"aio", "threads"})
