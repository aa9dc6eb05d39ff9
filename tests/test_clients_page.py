"""The clients' page is what its program makes of the results; the program runs with libraries that need not be here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent / "clients"))

import page
import rows


def test_the_page_is_that_of_its_results() -> None:
    assert page.render(json.loads(page.RESULTS.read_text())) == page.PAGE.read_text()


class TestRow:
    def test_equal_bits(self) -> None:
        row = rows.Row("library", "what")
        row.compare([torch.ones(3), 0.5], [torch.ones(3), 0.5])
        assert row.results == ["bitwise"]

    def test_within_what_was_allowed(self) -> None:
        row = rows.Row("library", "what")
        row.compare([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.0002])], within=1e-3, why="it is rounded")
        assert row.results == ["within 0.0001: it is rounded"]

    @pytest.mark.parametrize(
        ("found", "plain"),
        [
            ([torch.tensor(1.0 + 2**-23)], [torch.tensor(1.0)]),
            ([torch.zeros(2)], [torch.zeros(1)]),
            ([torch.zeros(2)], [torch.zeros(2, dtype=torch.float64)]),
            ([torch.tensor(float("nan"))], [torch.tensor(1.0)]),
            ([1.0], [1.0, 2.0]),
            ([], []),
        ],
    )
    def test_what_is_not_equal_fails(self, found: list, plain: list) -> None:
        with pytest.raises((AssertionError, ValueError)):
            rows.Row("library", "what").compare(found, plain)
